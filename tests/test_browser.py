"""The pages in a headless Chromium: real clicks and keys, a quiet console, nothing wider than a phone, reached from the keyboard.

Collected where a Chromium is installed (conftest.py); the pages' text, numbers and colors are tested without one in test_page.py.
"""

from __future__ import annotations

import re

import jobs
import pytest
from served import serving

from steptime import Job, estimate
from steptime.report.diff_tables import diff
from steptime.report.page import diff_page, search_page, whole_page
from steptime.search.run import search

PLAN = """model: gpt3-1.3b
parallelism: {tp: 4, pp: 2, dp: 2}
data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}
hardware: dgx-a100-80
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report that does not fit, a search, a comparison, as files; by name their addresses."""
    folder = tmp_path_factory.mktemp("pages")
    a, b = Job.load(PLAN), Job.load(PLAN, ["parallelism.tp=2", "parallelism.dp=4"])
    both = estimate(a), estimate(b)
    made = {
        "report": whole_page.page(estimate(jobs.job("llama3-70b", gbs=64, seqlen=8192, tp=8, pp=2, dp=1))),
        "search": search_page.page(search(a), 3),
        "diff": diff_page.page(both, ("A", "B"), diff(both, ("A", "B"), whole=True)),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture(scope="module")
def whatif():
    with serving() as made:
        yield made.url


def settled(browser):
    """Wait until the whole report stands there."""
    browser.wait(
        "document.getElementById('report').getAttribute('aria-busy') === 'false' && !!document.querySelector('#plan')"
    )


def step(browser):
    """The seconds of a step that the page tells."""
    return float(re.search(r"([\d.]+) s a step", browser.text("#status"))[1])


@pytest.mark.parametrize("name", ["report", "search", "diff"])
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_a_page_opens_quietly_and_is_no_wider_than_the_window(browser, pages, name, width, dark):
    browser.open(pages[name], width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark
    assert browser.said() == []


def test_a_notebooks_tables_scroll_in_their_own_box_and_have_no_empty_heading(browser, tmp_path):
    job = jobs.job("llama3-70b", gbs=64, seqlen=8192, tp=8, pp=2, dp=1)
    for name, shown in (("job", job), ("estimate", estimate(job))):
        page = tmp_path / f"{name}.html"
        page.write_text(f'<!doctype html><meta charset="utf-8">{shown._repr_html_()}', encoding="utf-8")
        browser.open(page.as_uri(), 390)
        assert browser.run("document.documentElement.scrollWidth") == 390
        assert browser.run("[...document.querySelectorAll('th')].filter(e => !e.innerText.trim()).length") == 0
        boxes = "[...document.querySelectorAll('div')].filter(e => e.scrollWidth > e.clientWidth)"
        assert browser.run(f"{boxes}.every(e => e.tabIndex === 0)")
    assert browser.run(f"{boxes}.length") > 0


@pytest.mark.parametrize("name", ["report", "search", "diff"])
def test_a_printed_page_is_no_wider_than_paper(browser, pages, name):
    """760 px: A4 with its margins at 96 dpi is some 720."""
    browser.open(pages[name], 760, media="print")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.documentElement.scrollWidth") == 760
    browser.run("window.dispatchEvent(new Event('afterprint'))")


@pytest.mark.parametrize("name", ["report", "search", "diff"])
def test_what_scrolls_on_a_phone_is_reached_from_the_keyboard(browser, pages, name):
    browser.open(pages[name], 390)
    shown = "document.querySelectorAll(':not(details) > .scroll')"
    boxes = f"[...{shown}].filter(e => e.scrollWidth > e.clientWidth)"
    browser.wait(f"{boxes}.length > 0 && {boxes}.every(e => e.tabIndex === 0)")


def test_printed_pages_are_light_and_whole(browser, pages):
    browser.open(pages["report"], 800, dark=True)
    shut = "document.querySelectorAll('details:not([open])').length"
    assert browser.run(shut) > 0
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(shut) == 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run(shut) > 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_it_round(browser, pages):
    browser.open(pages["report"])
    column = "[...document.querySelectorAll('#gemms tbody tr')].map(r => Number(r.cells[7].dataset.v))"
    before = browser.run(column)
    browser.click('#gemms [data-sort="7"]')
    assert browser.run(column) == sorted(before, reverse=True)
    browser.click('#gemms [data-sort="7"]')
    assert browser.run(column) == sorted(before)
    assert browser.run("document.querySelector('#gemms [aria-sort]').getAttribute('aria-sort')") == "ascending"


def test_the_schedule_tells_of_what_mouse_and_keys_point_at(browser, pages):
    browser.open(pages["report"])
    browser.wait("document.querySelector('canvas').style.height")
    browser.hover("canvas", 0.2, 0.4)
    assert re.match(r"stage 0: (forward|backward) of micro-batch \d+", browser.text(".readout"))
    browser.click('[data-zoom="first"]')
    browser.run("document.querySelector('canvas').focus()")
    browser.key("ArrowDown")
    assert browser.text(".readout").startswith("stage 1: ")
    first = browser.text(".readout")
    browser.key("ArrowRight")
    assert browser.text(".readout") != first
    assert browser.said() == []


def test_labels_of_the_schedules_axis_differ_however_far_it_is_zoomed(browser, pages):
    """A window of a ten-thousandth of the step: seconds with four digits would all read the same."""
    browser.open(pages["report"])
    browser.wait("document.querySelector('canvas').style.height")
    browser.run(
        "(() => { const of = CanvasRenderingContext2D.prototype, own = of.fillText; window.told = [];"
        " of.fillText = function (text, ...at) { window.told.push(text); own.call(this, text, ...at); }; })()"
    )
    browser.click('[data-zoom="last"]')
    for _ in range(6):
        browser.run("window.told.length = 0")
        browser.click('[data-zoom="in"]')
        labels = browser.run("window.told.filter(text => / (s|ms|us)$/.test(text))")
        assert len(labels) >= 3
        assert len(set(labels)) == len(labels)


def test_a_point_of_the_front_opens_its_plan(browser, pages):
    browser.open(pages["search"], 390)
    assert not browser.run("document.getElementById('plan-2').open")
    browser.click('svg a[href="#plan-2"] circle')
    browser.wait("document.getElementById('plan-2').open")
    assert browser.run("location.hash") == "#plan-2"
    assert "parallelism:" in browser.text("#yaml-plan-2")


def test_the_theme_is_changed_by_its_button(browser, pages):
    browser.open(pages["diff"])
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("[data-theme-toggle]")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before


def test_fields_change_the_figures_and_the_plan(browser, whatif):
    browser.open(whatif)
    settled(browser)
    before = step(browser)
    browser.type('[id="f-parallelism.tp"]', "4")
    browser.wait("document.getElementById('yaml').value.includes('tp: 4')")
    settled(browser)
    assert step(browser) != before
    assert browser.run("document.getElementById('f-parallelism.dp').placeholder") == "16"  # as many devices as before
    browser.run("document.querySelector('[data-slider=\"data.microbatch_sz\"]').focus()")
    browser.key("ArrowRight")
    browser.wait("document.getElementById('yaml').value.includes('microbatch_sz: 2')")
    settled(browser)
    assert browser.said() == []


def test_what_is_wrong_stands_beside_its_field_until_it_is_right(browser, whatif):
    browser.open(whatif)
    settled(browser)
    browser.type('[id="f-parallelism.tp"]', "3")
    browser.wait("document.getElementById('e-parallelism.tp').textContent.includes('must divide')")
    field = "document.getElementById('f-parallelism.tp').getAttribute('aria-invalid')"
    assert browser.run(field) == "true"
    browser.type('[id="f-parallelism.tp"]', "2")
    browser.wait("document.getElementById('e-parallelism.tp').textContent === ''")
    assert browser.run(field) is None
    settled(browser)


def test_the_status_says_that_a_plan_has_problems(browser, whatif):
    """Not the step of the last plan without any, nor that a search still runs."""
    browser.open(whatif)
    settled(browser)
    browser.run("const y = document.getElementById('yaml'); y.value = 'model: ['; y.dispatchEvent(new Event('input'))")
    browser.wait("document.getElementById('problems').innerText !== ''")
    assert browser.text("#status") == "1 problem; the report is of the last plan without problems"
    assert browser.run("document.getElementById('report').getAttribute('aria-busy')") == "false"
    browser.click("#best")
    browser.wait("document.getElementById('status').textContent !== 'searching ...'")
    assert browser.text("#status").startswith("1 problem;")
    assert browser.said() == []


def test_an_address_opens_its_plan_again(browser, whatif):
    browser.open(whatif)
    settled(browser)
    browser.type('[id="f-data.gbs"]', "512")
    browser.wait("document.getElementById('yaml').value.includes('gbs: 512')")
    settled(browser)
    address, plan, told = (
        browser.run("location.href"),
        browser.run("document.getElementById('yaml').value"),
        step(browser),
    )
    browser.open(address)
    settled(browser)
    assert browser.run("document.getElementById('yaml').value") == plan
    assert step(browser) == told


def test_the_machine_of_a_plan_is_chosen_in_its_field(browser, whatif):
    """dgx-h100 by an alias; a model of fields of its own has none of the choices."""
    browser.open(whatif)
    settled(browser)
    for said, shown in (("node_type: DGX H100", "dgx-h100"), ("node_type: dgx-a100-80", "dgx-a100-80")):
        browser.run(
            "(() => { const e = document.getElementById('yaml');"
            f" e.value = e.value.replace(/node_type: .*/, '{said}'); e.dispatchEvent(new Event('input')); }})()"
        )
        browser.wait(f"document.getElementById('f-hardware.node_type').value === '{shown}'")
    settled(browser)
    assert browser.said() == []


def test_a_pinned_plan_stays_beside_the_next_ones(browser, whatif):
    browser.open(whatif)
    settled(browser)
    browser.click("#pin")
    browser.type('[id="f-data.microbatch_sz"]', "2")
    browser.wait("document.getElementById('compare').innerText.includes('data.microbatch_sz')")
    assert re.search(r"data.microbatch_sz\s+1\s+2", browser.text("#compare"))
    browser.click("#unpin")
    browser.wait("document.getElementById('compare').hidden")
    assert browser.said() == []


def test_every_control_is_reached_by_the_tab_key_and_shows_it(browser, whatif):
    browser.open(whatif)
    settled(browser)
    controls = "[...document.querySelectorAll('aside input, aside select, aside button, aside textarea')].filter(e => !e.hidden)"
    count = browser.run(f"{controls}.length")
    assert count > 30
    seen = set()
    for _ in range(count):
        browser.key("Tab")
        seen.add(browser.run(f"{controls}.indexOf(document.activeElement)"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert seen == set(range(count))


def test_the_answer_stays_in_sight_on_a_phone(browser, whatif):
    browser.open(whatif, 390)
    settled(browser)
    assert browser.run("document.documentElement.scrollWidth") == 390
    browser.run("scrollTo(0, 0)")
    bottom = browser.run("document.getElementById('status').getBoundingClientRect().bottom")
    assert 0 < bottom <= 900
    assert "a step" in browser.text("#status")


def test_buttons_and_the_answer_are_in_sight_without_scrolling(browser, whatif):
    browser.open(whatif)
    settled(browser)
    for name in ("best", "pin", "status"):
        top, bottom = browser.run(
            f"(() => {{ const b = document.getElementById('{name}').getBoundingClientRect(); return [b.top, b.bottom]; }})()"
        )
        assert 0 <= top < bottom <= 900


def test_experts_are_spread_by_a_field(browser, whatif):
    browser.open(whatif)
    settled(browser)
    browser.run(
        "(() => { const e = document.getElementById('f-model.preset'); e.value = 'mixtral-8x7b';"
        " e.dispatchEvent(new Event('change')); })()"
    )
    browser.wait("document.getElementById('yaml').value.includes('mixtral-8x7b')")
    settled(browser)
    browser.type('[id="f-parallelism.ep"]', "8")
    browser.wait("document.getElementById('yaml').value.includes('ep: 8')")
    settled(browser)
    assert "a step" in browser.text("#status")
