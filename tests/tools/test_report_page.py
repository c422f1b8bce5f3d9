"""The explorer page: its data, the log of a run behind it, and the page itself in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baoc import (
    BAOC,
    BlockOptimizer,
    EffectPlanner,
    GradientStatistics,
    PaperPlanner,
    Plan,
    StatisticsCollector,
    state_bytes,
)
from baoc.tools.cli import main
from baoc.tools.report import ReportError, Run, RunLog, diff
from baoc.tools.report.explorer import Sources, _guessed_order, content, page
from baoc.tools.report.frontier import knee

WIDTH = 192


class Net(nn.Module):
    """Layers in a forward order that is not that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(12))
        self.a_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.embed(ids))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.a_norm(x))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a short run: its log, its gradient statistics and two plans."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = Net()
    collector = StatisticsCollector(model)
    optimizer = BAOC(model, lr=1e-3, memory=0.5)
    collector.attach(optimizer)
    with RunLog(folder / "run.jsonl", optimizer) as log:
        for step in range(1, 13):
            ids = torch.randint(0, 64, (8, 16))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:
                optimizer.plan.save(folder / "before.json")
            if step == 8:
                optimizer.replan(memory=0.1)
            log.step(step, float("nan") if step == 7 else loss.item())
        log.event(12, "the end </script><b>")
    collector.statistics().save(folder / "net.stats")
    optimizer.plan.save(folder / "after.json")
    return folder


# ---- the log ----


def test_a_run_reads_back_as_it_was_logged(trained: Path) -> None:
    run = Run.load(trained / "run.jsonl")
    assert [each.step for each in run.steps] == list(range(1, 13))
    assert [each.step for each in run.steps if each.loss is None] == [7]
    assert {each.phase for each in run.steps} == {"training"}
    assert run.order == tuple(name for name, _ in Net().named_parameters())
    last_step, last_plan = run.plans[-1]
    assert last_step == 8 and last_plan == Plan.load(trained / "after.json")
    assert run.steps[-1].state_bytes == last_plan.state_bytes < run.steps[6].state_bytes
    told = run.timeline()
    assert (7, "non-finite loss") in told and (12, "the end </script><b>") in told
    [migrated] = [text for step, text in told if step == 8]
    changed = sum("configuration" in each.what for each in diff(run.plans[-2][1], last_plan))
    assert migrated.startswith(f"new plan: state of {changed} of 55 tensors migrated")


def test_logged_bytes_are_those_that_are_held(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
    with RunLog(tmp_path / "run.jsonl", optimizer) as log:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        log.step(1, 0.5)
    assert Run.load(tmp_path / "run.jsonl").steps[0].state_bytes == state_bytes(optimizer)


def test_a_warm_up_is_a_phase(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = BAOC(model, memory=0.8, planner=PaperPlanner(warmup=2, time=50.0), verbose=False)
    with RunLog(tmp_path / "run.jsonl", optimizer) as log:
        for step in range(1, 5):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            log.step(step, 1.0)
    run = Run.load(tmp_path / "run.jsonl")
    assert [each.phase for each in run.steps] == ["warm-up", "training", "training", "training"]
    assert [step for step, _ in run.plans] == [1, 2]


def test_a_run_that_was_resumed_has_its_newer_steps(tmp_path: Path) -> None:
    optimizer = BlockOptimizer(nn.Linear(8, 8), lr=1e-3, plan="adamw-32")
    for steps, loss in [((1, 2, 3, 4), 1.0), ((3, 4, 5), 2.0)]:
        with RunLog(tmp_path / "run.jsonl", optimizer) as log:
            for step in steps:
                log.step(step, loss)
    run = Run.load(tmp_path / "run.jsonl")
    assert [(each.step, each.loss) for each in run.steps] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert (3, "resumed") in run.timeline()


def test_a_line_that_was_not_finished_is_left_out_and_a_wrong_one_is_named(trained: Path, tmp_path: Path) -> None:
    text = (trained / "run.jsonl").read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[:-9])
    assert len(Run.load(cut).steps) == 12 and not any("the end" in event for _, event in Run.load(cut).timeline())
    cut.write_text(text.replace('"step": 2, "loss"', '"step": 2, "lss"'))
    with pytest.raises(ReportError, match=r"line 4 of .*'loss'"):
        Run.load(cut)
    cut.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ReportError, match="has no steps"):
        Run.load(cut)


BAD_LINES = {
    "nested": ("[" * 100_000, "its brackets are nested too deeply"),
    "no JSON": ("{", "it is not JSON"),
    "a list": ("[1]", "list indices"),
    "not finite": ('{"kind": "step", "step": 1, "loss": NaN, "state_bytes": 1, "phase": "x"}', "NaN is out of range"),
    "a huge step": ('{"kind": "step", "step": 1e999, "loss": 1}', "1e999 is out of range"),
    "a huge shape": (
        json.dumps(
            {
                "kind": "plan",
                "step": 0,
                "order": ["w"],
                "plan": {
                    "format": "baoc.plan",
                    "version": 1,
                    "blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [1 << 40, 1 << 40]}}],
                },
            }
        ),
        "a shape must be a list of whole numbers, at most 2",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_line_that_no_log_has_is_refused_in_one_line(case: str, trained: Path, tmp_path: Path) -> None:
    line, message = BAD_LINES[case]
    first, *others = (trained / "run.jsonl").read_text().splitlines()
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([first, line, *others]))
    with pytest.raises(ReportError, match=rf"line 2 of .*bad.jsonl' is not valid in a run log: .*{message}") as caught:
        Run.load(path)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith("..")


def test_a_log_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"{}\n\xff")
    with pytest.raises(ReportError, match="is not a run log: byte 3 is not UTF-8"):
        Run.load(path)


# ---- the data ----


def embedded(html: str) -> dict[str, Any]:
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    loaded: dict[str, Any] = json.loads(found)
    return loaded


@pytest.fixture(scope="module")
def html(trained: Path) -> Path:
    out = trained / "report.html"
    files = [str(trained / name) for name in ("net.stats", "before.json", "after.json", "run.jsonl")]
    assert main(["report", *files, "-o", str(out), "--title", "a small <net>"]) == 0
    return out


def test_the_page_has_all_in_one_file(html: Path) -> None:
    text = html.read_text()
    assert text.startswith("<!doctype html>") and "<title>a small &lt;net&gt; · baoc</title>" in text
    links = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|img|iframe)|@import|url\((?!#)|\bfetch\(|XMLHttpRequest|\{\{\w+\}\}", text)


def test_the_data_are_those_of_plans(html: Path, trained: Path) -> None:
    data = embedded(html.read_text())
    shapes = {name: tuple(param.shape) for name, param in Net().named_parameters()}
    assert [(tensor["name"], tuple(tensor["shape"])) for tensor in data["tensors"]] == list(shapes.items())
    assert data["layers"][:3] == ["embed", "stem", "blocks.0"] and data["layers"][-2:] == ["a_norm", "head"]
    names = [plan["name"] for plan in data["plans"]]
    assert names[:2] == ["before.json", "after.json"] and names[2] == "run, step 1"
    for drawn, plan in zip(data["plans"], (Plan.load(trained / "before.json"), Plan.load(trained / "after.json"))):
        assert drawn["bytes"] == plan.state_bytes
        for index, name in enumerate(shapes):
            configuration = data["configurations"][drawn["configuration_of"][index]]
            assert configuration["spelling"] == str(plan.block_of(name).configuration)
            assert configuration["bytes"][index] == plan.block_of(name).configuration.state_bytes(shapes[name])
            assert drawn["blocks"][drawn["block_of"][index]]["why"] == plan.block_of(name).why
    assert data["reference_bytes"] == Plan.uniform("adamw-16", shapes).state_bytes


def test_the_frontier_rises_in_memory_and_falls_in_loss(html: Path) -> None:
    data = embedded(html.read_text())
    plans = data["frontier"]
    assert len(plans) > 6
    for plan, larger in pairwise(plans):
        assert plan["bytes"] < larger["bytes"] and larger["loss"] < plan["loss"]
    assert data["knee"] == knee([plan["bytes"] for plan in plans], [plan["risk"] for plan in plans])
    assert plans[data["auto"]]["loss"] <= plans[-1]["loss"] + EffectPlanner().tolerance + 1e-6
    for plan in plans:
        held = sum(data["configurations"][which]["bytes"][i] for i, which in enumerate(plan["configuration_of"]))
        assert held == plan["bytes"]
        low, high = plan["interval"]
        assert low <= plan["loss"] <= high and "runs" in plan["source"]


def test_metrics_are_the_papers_where_there_are_statistics(html: Path, trained: Path) -> None:
    tensors = {tensor["name"]: tensor for tensor in embedded(html.read_text())["tensors"]}
    metrics = tensors["stem.weight"]["metrics"]
    assert metrics["anisotropy"] > 0 and 0.9 < metrics["int8 alignment"] <= 1
    assert tensors["a_norm.weight"]["metrics"]["structure residual"] is None  # a vector
    records = GradientStatistics.load(trained / "net.stats").records
    sampled = {name for name, record in records.items() if len(record.second)}
    assert {name for name, tensor in tensors.items() if tensor["metrics"]} == sampled
    assert "stem.bias" not in sampled  # all samples of its unit are of the weight
    without = content(Sources("plan", plans={"plan": Plan.load(trained / "after.json")}))
    assert all(tensor["metrics"] is None for tensor in without["tensors"])


def test_a_plan_alone_has_a_frontier_and_the_models_order(trained: Path) -> None:
    plan = Plan.load(trained / "after.json")
    data = content(Sources("plan", plans={"after.json": plan}))
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in Net().named_parameters()))
    assert data["layers"] == list(dict.fromkeys(re.sub(r"(blocks\.\d+).*", r"\1", layer) for layer in layers))
    assert len(data["frontier"]) > 5 and data["run"] is None
    assert sorted(_guessed_order(plan)) == sorted(name for name, _ in Net().named_parameters())
    by_hand = content(Sources("hand", plans={"hand": Plan.uniform("adamw-8", {"b.weight": (64, 64), "a.bias": (64,)})}))
    assert by_hand["plans"][0]["loss"] is None and by_hand["plans"][0]["blocks"][0]["loss"] is None


def test_the_papers_risk_is_not_taken_for_a_loss(trained: Path) -> None:
    statistics = GradientStatistics.load(trained / "net.stats")
    data = content(Sources("paper", statistics, planner=PaperPlanner(time=50.0)))
    assert len(data["frontier"]) > 2 and data["auto"] is None
    assert all(plan["loss"] is None and plan["risk"] >= 0 for plan in data["frontier"])


def test_a_long_run_is_thinned_and_keeps_its_changes(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-32")
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with RunLog(tmp_path / "run.jsonl", optimizer) as log:
        for step in range(4000):
            if step == 2500:
                optimizer.set_plan("sgd")
            log.step(step, 5.0 - step / 1000)
    found = content(Sources("long", run=Run.load(tmp_path / "run.jsonl")))["run"]
    assert len(found["loss"]) <= 1500 and found["last_step"] == 3999
    assert found["loss"][0][1] == pytest.approx(5.0, abs=0.01) and found["loss"][-1][1] == pytest.approx(1.0, abs=0.01)
    assert found["plan_steps"] == [0, 2500] and [step for step, _ in found["state_bytes"]] == [0, 2500]


@pytest.mark.parametrize(
    "files, part",
    [
        (["missing.stats"], "No such file"),
        (["net.stats", "net.stats"], "at most one of the 2 files of gradient statistics"),
        (["net.stats", "other.json"], "other.json belongs to another model"),
        (["broken.jsonl"], "not a file of gradient statistics"),
        (["--planner", "paper", "before.json"], "pass a file of gradient statistics"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    files: list[str], part: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan.uniform("adamw-8", {"other": (64, 64)}).save(trained / "other.json")
    (trained / "broken.jsonl").write_text("{}\n")
    paths = [str(trained / name) if "." in name else name for name in files]
    assert main(["report", *paths, "-o", str(trained / "no.html")]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1 and not (trained / "no.html").exists()


def test_names_cannot_break_out_of_the_page() -> None:
    name = "</script><script>alert(1)</script>"
    text = page(Sources(name, plans={name: Plan.uniform("adamw-8", {name: (64, 64)})}))
    assert "<script>alert" not in text
    assert embedded(text)["tensors"][0]["name"] == name


# ---- in a browser ----

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium or its chromedriver is not installed")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.implicitly_wait(10)  # pictures are drawn when their place on the page is known
    yield running
    running.quit()


@pytest.fixture
def opened(browser: Any, html: Path) -> Any:
    browser.get(html.as_uri())
    browser.find_element("css selector", "#model .block")
    yield browser
    assert browser.get_log("browser") == []  # no errors, and nothing that was looked for on a network


def text_of(browser: Any, selector: str) -> str:
    found: str = browser.find_element("css selector", selector).text
    return found


def fills(browser: Any, box: str) -> list[str]:
    script = f"return [...document.querySelectorAll('#{box} .block')].map((block) => block.style.fill)"
    found: list[str] = browser.execute_script(script)
    return found


def test_the_slider_moves_through_the_frontier(opened: Any, html: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    data = embedded(html.read_text())
    slider = opened.find_element("id", "budget")
    seen = {}
    for key, index in [(Keys.HOME, 0), (Keys.END, len(data["frontier"]) - 1)]:
        slider.send_keys(key)
        assert slider.get_property("value") == str(index)
        plan, shown = data["frontier"][index], fills(opened, "model")
        assert len(shown) == len(data["tensors"])
        for i, which in enumerate(plan["configuration_of"]):
            assert (shown[i] == shown[0]) == (which == plan["configuration_of"][0])
        assert "of state" in text_of(opened, "#numbers") and text_of(opened, "#legend tbody")
        seen[index] = (shown, text_of(opened, "#numbers"))
    assert len({str(value) for value in seen.values()}) == 2
    opened.find_element("xpath", "//button[starts-with(., 'auto')]").click()
    assert slider.get_property("value") == str(data["auto"])


def test_areas_are_in_proportion_to_parameters(opened: Any, html: Path) -> None:
    script = """return [...document.querySelectorAll('#model .block')].map(
        (block) => block.width.baseVal.value * block.height.baseVal.value)"""
    areas = opened.execute_script(script)
    tensors = embedded(html.read_text())["tensors"]
    places = {tensor["name"]: index for index, tensor in enumerate(tensors)}
    first, last = places["blocks.0.1.weight"], places["blocks.11.1.weight"]
    assert areas[first] == pytest.approx(areas[last], rel=0.01)
    stem = places["stem.weight"]
    assert areas[stem] / areas[first] == pytest.approx(tensors[stem]["numel"] / tensors[first]["numel"], rel=0.15)


def test_a_tensor_is_told_of_by_pointer_and_by_keyboard(opened: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    block = opened.find_element("css selector", "#model .block[aria-label^='blocks.3.1.weight']")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", block)
    ActionChains(opened).move_to_element(block).perform()
    tip = text_of(opened, "#tip")
    for word in ("blocks.3.1.weight", "36.9K parameters", "expected loss", "anisotropy", "state of AdamW16"):
        assert word in tip
    first = opened.find_element("css selector", "#model .block[tabindex='0']")
    first.send_keys(Keys.ARROW_RIGHT)
    focused = opened.switch_to.active_element
    assert focused.get_attribute("aria-label").startswith("stem.weight: ")
    assert "stem.weight" in text_of(opened, "#tip")
    focused.send_keys(Keys.ESCAPE)
    assert not opened.find_element("id", "tip").is_displayed()


def test_two_plans_are_compared(opened: Any, html: Path) -> None:
    data = embedded(html.read_text())
    opened.find_element("id", "tab-compare").click()
    before, after = data["plans"][:2]
    changed = sum(a != b for a, b in zip(before["configuration_of"], after["configuration_of"]))
    assert changed and f"{changed} of {len(data['tensors'])}" in text_of(opened, "#difference")
    assert len(opened.find_elements("css selector", "#model-a .faded")) == len(data["tensors"]) - changed
    opened.find_element("id", "dim").click()
    assert not opened.find_elements("css selector", "#model-a .faded")
    assert len(opened.find_elements("css selector", "#changes tbody tr")) >= 1


def test_a_run_is_shown_and_leads_to_its_migrations(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    tab = opened.find_element("id", "tab-explore")
    tab.send_keys(Keys.ARROW_LEFT)  # round to the last one
    assert opened.find_element("id", "run").is_displayed()
    chart = opened.find_element("css selector", "#loss svg")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert "of state, training" in text_of(opened, "#readout")
    events = text_of(opened, "#events")
    assert "the end </script><b>" in events and "non-finite loss" in events
    opened.find_elements("css selector", "#events button")[-1].click()
    assert opened.find_element("id", "compare").is_displayed()
    assert "run, step 8" in text_of(opened, "#caption-b")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_any_screen_in_both_themes(opened: Any, scheme: str, width: int) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened.refresh()
        root = opened.find_element("css selector", "html")
        assert root.get_attribute("data-theme") == scheme
        for view in ("explore", "compare", "run"):
            opened.find_element("id", f"tab-{view}").click()
            assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        opened.find_element("id", "theme").click()
        assert root.get_attribute("data-theme") != scheme
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
