"""The page about a run: all of it in one file, escaped, and seen by a browser."""

import json
import re
import subprocess
from html.parser import HTMLParser

import pytest

from deepspeed.cli import report_run
from deepspeed.errors import DeepSpeedError
from deepspeed.run_report import page_times
from deepspeed.run_report.page import write_report
from tests.harness.programs import needs_program
from tests.run_report.runs import step_line, write_rank

EVIL = "<script>alert('&')</script>"


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        steps = [step_line(n, loss=4.0 / n, norm=1.0, lr=0.1, skipped=int(n > 3)) for n in range(1, 9)]
        more = {"config": {"optimizer.type": EVIL}, "defaults": {"fp16.enabled": False}, "versions": {"torch": EVIL}}
        write_rank(tmp_path, rank, steps, has_ended=rank == 0, **more)
    lines = [{"kind": "event", "time": 1.0, "name": "save", "step": 5, "tag": EVIL, "seconds": 0.5}]
    lines.append({"kind": "event", "time": 2.0, "name": "memory", "rows": [["master weights", 10, 12, "4 x Psi"]]})
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    plan = {"step_seconds_at_least": 0.25, "sent_by_axis": {"data": 500}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag != "line":
            assert self.open.pop() == tag


def test_the_page_is_whole_and_nothing_of_the_run_is_code(folder):
    text = write_report(folder).read_text()
    tags = _Tags()
    tags.feed(text)
    assert not tags.open and "script" not in tags.seen and "link" not in tags.seen
    assert EVIL not in text and text.count("&lt;script&gt;") >= 3
    assert not re.search(r"https?://|url\(|@import", text), "the page needs no network"


def test_the_page_shows_what_was_recorded(folder):
    text = re.sub(r"<[^>]+>", "|", write_report(folder).read_text())
    assert "4 to 0.5" in text  # the loss
    assert "Not ended: rank 1 after step 8" in text
    assert "the update was skipped" in text and "save" in text
    assert "|250.00||1,000.00||4.000|" in text  # milliseconds: plan, run, ratio
    assert "|master weights||12||10||4 x Psi|" in text and "|data||500||1,000||2.000|" in text
    assert "|fp16.enabled||false||default|" in text
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["steps"] == 8 and numbers["unfinished"] == [1]


def test_a_save_is_one_event_with_the_slowest_ranks_time(tmp_path):
    for rank in range(3):
        write_rank(tmp_path, rank, [step_line(n) for n in range(1, 5)], has_ended=False)
        with (tmp_path / f"rank-{rank:05d}.jsonl").open("a") as file:
            for step in (2, 4, 4):  # the last again, after a restart
                line = {"kind": "event", "time": 1.0, "name": "save", "step": step, "tag": "t", "seconds": 0.5 + rank}
                file.write(json.dumps(line) + "\n")
    write_report(tmp_path)
    events = [e for e in json.loads((tmp_path / "report.json").read_text())["events"] if e["name"] == "save"]
    assert [(e["step"], e["seconds"], e["rank"]) for e in events] == [(2, 2.5, 2), (4, 2.5, 2), (4, 2.5, 2)]
    assert events[0]["text"] == "save: tag t, seconds 2.5, the slowest rank"


def test_a_long_step_is_a_moment_on_the_page(tmp_path):
    write_rank(tmp_path, 0, [step_line(n, seconds=0.5 if n != 5 else 9.0) for n in range(1, 9)])
    text = write_report(tmp_path).read_text()
    assert "step 5 took 9 s, 18 times the median: rank 0, outside the engine" in text
    assert "cut at 1.5: step 5" in text, "the other steps stay visible"
    assert "outside the engine, ranks by steps; strongest color: 300.0 ms and more (up to 8,600.0 ms)" in text


def test_a_run_without_a_step_has_a_page(tmp_path):
    write_rank(tmp_path, 0, [])
    text = write_report(tmp_path).read_text()
    assert "Run of 1 rank, 0 steps" in text and "No step was recorded." in text and "0.0 ms" not in text


def test_what_is_not_finite_is_named_and_does_not_spoil_the_curve_or_the_json(tmp_path):
    losses = [1.0, float("nan"), 0.5, float("inf"), 0.25]
    write_rank(tmp_path, 0, [step_line(n, loss=loss, norm=float("inf")) for n, loss in enumerate(losses, 1)])
    text = write_report(tmp_path).read_text()
    assert "loss; not finite: steps 2, 4" in text and "gradient norm; not finite: steps 1, 2, 3 and 2 more" in text
    assert "nan" not in re.sub(r"<p.*?</p>", "", text.partition("</style>")[2])
    numbers = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert numbers["curves"]["loss"] == [[1, 1.0], [2, None], [3, 0.5], [4, None], [5, 0.25]]
    assert numbers["plan_beside_run"]["bytes"] == [["data", "", 1000, ""]] and numbers["peak_memory_bytes"] == 2**30


def test_loads_of_experts_and_recoveries_are_curves_and_marks(tmp_path):
    more = {"experts/0/imbalance": 1.5, "experts/1/imbalance": 2.5, "experts/0/dropped_percent": 3.0}
    for rank in (0, 1):
        file = write_rank(tmp_path, rank, [step_line(n, loss=1.0, more=more) for n in (1, 2, 3)], has_ended=False)
        file = type(file)(tmp_path, rank)
        file.write("event", name="recovery", step=2, seconds=0.25 + rank, ranks_before=3, ranks_now=2, repeated_steps=1)
        file.write("end")
        file.close()
    page = write_report(tmp_path).read_text()
    assert "Loads of experts" in page and "routes dropped" in page and ">2.5</text>" in page
    assert page.count('class="mark recovery"') == 1
    assert "recovery: seconds 1.25, ranks_before 3, ranks_now 2, repeated_steps 1, the slowest rank" in page


@pytest.mark.parametrize(("plan", "figure"), [({"flops": 5e9, "device_flops": 1e11}, "10.0%"), ({"flops": 5e9}, "")])
def test_the_share_of_the_devices_rate_is_by_the_plan(plan, figure, tmp_path):
    write_rank(tmp_path, 0, [step_line(n, seconds=0.5) for n in range(1, 6)])
    assert "No MFU" in write_report(tmp_path).read_text()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    page = write_report(tmp_path).read_text()
    assert figure in page and ("MFU, by the plan" in page) == bool(figure)


def test_what_the_model_was_counted_to_take_gives_the_mfu(tmp_path):
    write_rank(tmp_path, 0, [step_line(n, seconds=0.5, tokens=200 if n == 1 else 100) for n in range(1, 6)])
    counted = {
        "kind": "event",
        "time": 1.0,
        "name": "operations",
        "of_update": 4e9,
        "tokens": 200,
        "device_flops": 1e11,
    }
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps(counted) + "\n")
    (tmp_path / "plan.json").write_text(json.dumps({"flops": 5e9, "device_flops": 1e11}))
    page = write_report(tmp_path).read_text()
    assert "4.8%" in page and "FLOP/s (MFU)" in page and "by the plan" not in page
    assert "operations" not in page.split("<h2>Events</h2>")[-1]


def test_a_page_that_cannot_be_written_is_one_sentence(folder, monkeypatch):
    (folder / "report.html").mkdir()
    with pytest.raises(DeepSpeedError, match=r"report\.html: cannot be written \(Is a directory\)"):
        write_report(folder)
    assert not list(folder.glob("*.part"))
    lines = []
    monkeypatch.setattr(page_times, "log_dist", lambda line, **_: lines.append(line))
    page_times.report_at_end(folder, 1, has_failed=True)
    assert len(lines) == 1 and lines[0].startswith("run report: no page was written: ")


def test_the_command_prints_where_the_page_is(folder, capsys):
    report_run.main([str(folder)])
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"


def _show_in_a_browser(page, *options):
    """Returns what chromium shows: the picture's file, the page's elements as text, and the lines of its console."""
    picture = page.parent / "seen.png"
    base = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=960,2600"]
    base += [f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [*base, *options, f"--screenshot={picture}", "--dump-dom", page.as_uri()],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return picture, done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@needs_program("chromium")
def test_a_browser_shows_it_light_and_dark(folder):
    from matplotlib import image

    page = write_report(folder)
    corners = []
    for options in ((), ("--blink-settings=preferredColorScheme=0",)):
        picture, elements, console = _show_in_a_browser(page, *options)
        assert console == []
        text = re.sub(r"<[^>]+>", "|", elements)
        for words in ("Run of 2 ranks, 8 steps", "What to change first", "Not ended: rank 1 after step 8", "Events"):
            assert words in text
        assert elements.count("<svg") == text.count("ranks by steps") + 5, "four curves, the areas, and the maps"
        pixels = image.imread(picture)
        corners.append(float(pixels[5, 5, :3].mean()))
        colors = {tuple(pixel) for pixel in (pixels[::4, ::4, :3] * 8).astype(int).reshape(-1, 3).tolist()}
        assert len(colors) > 10, "text, curves, areas and maps"
    assert corners[0] > 0.9 and corners[1] < 0.2


@pytest.mark.slow
@needs_program("chromium")
def test_a_browser_draws_the_loads_of_experts(tmp_path):
    from matplotlib import image

    loads = {n: {"experts/0/imbalance": 1.0 + n, EVIL: n, f"experts/{EVIL}/imbalance": 9.0 - n} for n in range(1, 9)}
    write_rank(tmp_path, 0, [step_line(n, loss=1.0, more=more) for n, more in loads.items()])
    text = write_report(tmp_path).read_text()
    head, _, after = text.partition("<h2>Loads of experts</h2>")
    assert 'class="curve"' in after.partition("</svg>")[0]
    pictures = []
    for name, curve in (("with", after), ("without", re.sub('<[^>]*class="curve"[^>]*>', "", after, count=1))):
        page = tmp_path / f"{name}.html"  # the section alone, at the top of the picture
        page.write_text(f"{head.partition('<body>')[0]}<body><h2>Loads of experts</h2>{curve}")
        picture, elements, console = _show_in_a_browser(page)
        assert console == [] and "<script" not in elements and "Loads of experts" in elements
        pictures.append(image.imread(picture)[:300, :, :3])
    changed = (abs(pictures[0] - pictures[1]).max(axis=2) > 0.1).any(axis=0)
    assert changed.sum() > 400, "pixels of the width in which the curve is drawn"


@needs_program("chromium")
def test_what_a_browser_complains_about_is_seen(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><meta charset=utf-8><script>nothing()</script>")
    _, _, console = _show_in_a_browser(page)
    assert len(console) == 1 and "nothing is not defined" in console[0]
