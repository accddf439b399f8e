"""Small modules by the names of the two services, with the calls that their monitors make."""

import sys
from types import SimpleNamespace
from typing import Any


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.is_finished = False

    def log(self, data, step=None, commit=None):
        # The service drops what comes for an earlier step than the last.
        assert not self.logged or step is None or step >= (self.logged[-1][0] or 0)
        self.logged.append((step, dict(data)))

    def finish(self):
        self.is_finished = True


def fake_wandb(open_run: FakeRun | None = None) -> SimpleNamespace:
    module = SimpleNamespace(run=open_run, made=[])

    def init(**settings):
        module.made.append(FakeRun(**settings))
        return module.made[-1]

    module.init = init
    return module


class FakeExperiment:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.name: str | None = None
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_ended = False

    def set_name(self, name):
        self.name = name

    def get_key(self):
        return "key-1"

    def log_metrics(self, values, step=None):
        self.logged.append((step, dict(values)))

    def flush(self):
        pass

    def end(self):
        self.is_ended = True


def fake_comet() -> SimpleNamespace:
    module = SimpleNamespace(made=[])

    def start(**settings):
        module.made.append(FakeExperiment(settings))
        return module.made[-1]

    module.start = start
    return module


def install(monkeypatch: Any, name: str, module: Any) -> Any:
    monkeypatch.setitem(sys.modules, name, module)
    return module
