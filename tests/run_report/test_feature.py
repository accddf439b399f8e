"""The line about a rank that stays slow."""

import pytest
from torch.distributed import HashStore

from deepspeed.config import parse
from deepspeed.run_report import feature, recorder
from deepspeed.run_report.feature import WINDOW, RankFileReader, StepBoard, StragglerWatch, settings_of
from deepspeed.run_report.page import all_events
from deepspeed.run_report.rank_file import RankFile
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import read_run
from tests.engine.support import engine_of, inputs
from tests.engine.support import rank as own_rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower
from tests.run_report.runs import step_line


class Run:
    """Two ranks whose steps a test writes, and rank 0's watch with a clock that a test sets."""

    def __init__(self, folder):
        self.now = 0.0
        self.step = 0
        self.folder = folder
        self.files = [RankFile(folder, rank) for rank in range(2)]
        for rank, file in enumerate(self.files):
            file.write("start", rank=rank, host=f"node{rank}")
        self.watch = StragglerWatch(RankFileReader(folder).read, 2, lambda: self.now)
        self.recorder = StepRecorder(folder / "own", 0, {})

    def go(self, steps, *, slow):
        for _ in range(steps):
            self.step += 1
            self.now += 1.0
            for rank, file in enumerate(self.files):
                file.write("step", **step_line(self.step, forward=0.6, wait=0.0 if rank == slow else 0.4))
                file.flush()
            self.watch.after_step(self.recorder, self.step)


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    found.recorder.close()


@pytest.fixture
def texts(monkeypatch):
    lines = []
    monkeypatch.setattr(feature, "log_dist", lines.append)
    return lines


def test_a_rank_that_stays_slow_is_named_once_per_stretch(run, texts):
    run.go(40, slow=None)
    assert texts == []
    run.go(60, slow=1)
    (line,) = texts
    assert line.startswith("straggler: rank 1 (node1) takes 2.00 times as long") and "in forward" in line
    run.go(60, slow=None)
    run.go(60, slow=1)
    assert len(texts) == 2, "named again after a stretch in which it was as fast as the others"
    run.recorder.close()
    events = [event for event in all_events(read_run(run.folder / "own")) if event["name"] == "straggler"]
    assert [event["slow_rank"] for event in events] == [1, 1] and all("step" in event for event in events)


def test_a_moment_is_no_stretch(run, texts):
    for _ in range(6):
        run.go(WINDOW - 4, slow=None)
        run.go(4, slow=0)
    assert texts == []


def test_steps_of_an_earlier_start_do_not_count(run, texts):
    run.watch = StragglerWatch(RankFileReader(run.folder).read, 2, lambda: -1.0)  # never looks
    run.go(WINDOW, slow=1)
    for file in run.files:
        file.write("start", rank=0)
    run.watch = StragglerWatch(RankFileReader(run.folder).read, 2, lambda: run.now)
    run.go(WINDOW - 1, slow=1)
    assert texts == []
    run.go(12, slow=1)
    assert len(texts) == 1


def test_facts_are_those_of_the_latest_start(tmp_path, monkeypatch):
    """A run that was started again in the same folder may have other hosts. Its start can be far from the end."""
    file = RankFile(tmp_path, 0)
    for host in ("first", "second"):
        file.write("start", rank=0, host=host, config={"a": "b" * 40_000})
        for number in range(1, 300):
            file.write("step", **step_line(number))
    file.close()
    reader = RankFileReader(tmp_path)
    assert reader.read(0).facts["host"] == "second"
    with file.path.open("a") as more:
        more.write('{"kind": "start", "time": 1.0, "host": "third"}\n')
        more.writelines('{"kind": "step", "time": 1.0, "step": 1}\n' for _ in range(1000))
    assert RankFileReader(tmp_path).read(0).facts["host"] == "third"
    file.path.write_text('{"kind": "start", "time": 1.0, "ho')
    assert RankFileReader(tmp_path).read(0) is None

    def fail(*_args):
        raise OSError(116, "Stale file handle")  # of a network file system

    monkeypatch.setattr("pathlib.Path.open", fail)
    assert reader.read(0) is None


def test_a_file_that_is_not_there_is_left_out(run, texts):
    run.watch = StragglerWatch(RankFileReader(run.folder).read, 3, lambda: run.now)
    run.go(3 * WINDOW, slow=1)
    assert len(texts) == 1


def test_a_look_that_costs_much_is_rare(run, monkeypatch):
    looks = []

    def expensive(ranks):
        looks.append(run.now)
        run.now += 0.1
        return []

    monkeypatch.setattr(run.watch, "_slow", expensive)
    run.go(200, slow=None)
    assert looks[1] - looks[0] >= 50.0


def test_many_ranks_are_compared_in_turns(run, texts, monkeypatch):
    monkeypatch.setattr(feature, "_MAX_COMPARED", 2)
    for rank in range(2, 5):
        file = RankFile(run.folder, rank)
        file.write("start", rank=rank, host=f"node{rank}")
        run.files.append(file)
    run.watch = StragglerWatch(RankFileReader(run.folder).read, 5, lambda: run.now)
    run.go(100, slow=3)
    assert len(texts) == 1 and "rank 3 (node3)" in texts[0], "named once, although other ranks have their turns between"


class Posting:
    """Ranks that post at one store, with a clock that a test sets."""

    def __init__(self, ranks):
        self.now, self.step, self.store = 0.0, 0, HashStore()
        facts = [{"host": f"node{rank}", "stage": 0, "pid": 1} for rank in range(ranks)]
        self.posts = [StepBoard(self.store, rank, ranks, facts[rank], lambda: self.now) for rank in range(ranks)]
        self.recorder = StepRecorder(self.posts[0].steps, 0, {})

    def go(self, steps, *, slow, silent=()):
        for _ in range(steps):
            self.step += 1
            self.now += 1.0
            for rank, posts in reversed(list(enumerate(self.posts))):
                if rank not in silent:
                    posts.steps.write("step", **step_line(self.step, forward=0.6, wait=0.0 if rank == slow else 0.4))
                    posts.after_step(self.recorder, self.step)


@pytest.fixture
def posting():
    found = Posting(3)
    yield found
    found.recorder.close()


def test_without_files_ranks_are_compared_by_their_posts(posting, texts):
    posting.go(3 * WINDOW, slow=None)
    assert texts == []
    posting.go(3 * WINDOW, slow=2)
    (line,) = texts
    assert line.startswith("straggler: rank 2 (node2) takes") and "in forward" in line


def test_a_post_of_other_steps_is_left_out(posting, texts):
    posting.go(WINDOW, slow=None)
    posting.go(2 * WINDOW + 1, slow=1, silent=(2,))
    assert len(texts) == 1 and "rank 1 (node1)" in texts[0], "the others are compared without the rank that has stopped"


def test_engines_have_their_own_posts(posting, texts):
    other = [StepBoard(posting.store, rank, 3, {"host": "", "stage": 0}, lambda: 0.0) for rank in range(3)]
    assert len({posts._key(0) for posts in (*posting.posts, *other)}) == 2


def test_a_store_that_has_gone_ends_no_rank(posting, texts, monkeypatch):
    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(posting.posts[0], "_store", type("Gone", (), {"set": gone, "check": gone})())
    posting.go(2 * WINDOW + 1, slow=1)
    assert texts == []


class Ticks:
    """A clock that a test sets."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin


def _train_with_posts():
    texts, clock = [], Ticks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature, "log_dist", texts.append)
        patch.setattr(feature, "_MIN_PAUSE", 0.0)
        patch.setattr(feature, "_MAX_TIME_SHARE", 1e9)  # however long a look takes
        patch.setattr(feature, "WINDOW", 3)
        patch.setattr(recorder, "phase_clock", lambda: clock)
        engine = engine_of(tower(), 2, run_report={"stragglers": True})
        for step in range(7):
            clock.now += 1.0 + own_rank()  # outside the engine
            engine.backward(engine(inputs(step, 0, own_rank())))
            engine.step()
        engine.destroy()
    return [line for line in texts if line.startswith("straggler")]


def test_a_training_without_a_report_names_its_straggler():
    (text,), other = run_ranks(_train_with_posts, 2)
    assert text.startswith("straggler: rank 1") and "takes 2.00 times" in text and "outside the engine" in text
    assert other == []


def test_settings_that_are_no_json_are_shown_as_text():
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "LambdaLR", "params": {"lr_lambda": abs}},
    }
    changed, _ = settings_of(parse(config).root)
    assert changed["scheduler.params.lr_lambda"] == str(abs) and changed["optimizer.params.lr"] == 0.1
