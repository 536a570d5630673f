"""The sandbox's allocator does what memlab's does, action by action, pressed in a real browser."""

import random

import pytest
import torch

from memlab.panels.sandbox import TOY, AllocatorSandbox
from memlab.trace.card_memory import CardMemory
from memlab.units import MiB

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

SIZES = [1, 512, 513, 1000, 300_000, MiB, MiB + 1, 3 * MiB, 5 * MiB, 8 * MiB, 10 * MiB - 512]
SIZES += [10 * MiB, 12 * MiB, 19 * MiB - 1024, 20 * MiB, 25 * MiB + 1, 31 * MiB]


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(AllocatorSandbox())


def drawn(page):
    """[address, size, [[address, size, is a tensor] ...]] of each segment on the page."""
    return page.run("""[...panel.querySelectorAll('.part')].map(part => [
        Number(part.dataset.address), Number(part.dataset.size),
        [...part.querySelectorAll('.blocks > *')].map(block => [
            Number(block.dataset.address), Number(block.dataset.size), block.tagName === 'BUTTON',
        ])])""")


def segments(memory):
    """The same of memlab's allocator."""
    found = []
    for block in memory.blocks.values():
        if block.before is None:
            blocks, each = [], block
            while each:
                blocks.append([each.address, each.size, not each.free])
                each = each.after
            found.append([block.address, block.segment, blocks])
    return found


class Both:
    """The page, and memlab's allocator beside it."""

    def __init__(self, page):
        self.page, self.memory, self.held, self.failed = page, CardMemory(TOY), [], 0
        page.click(".again")

    def allocate(self, nbytes):
        self.page.set("mib", repr(nbytes / MiB))
        self.page.click(".allocate")
        try:
            self.held.append(self.memory.allocate(nbytes))
            assert self.page.run("panel.querySelector('.reason').hidden")
        except torch.OutOfMemoryError as error:
            self.failed += 1
            said = str(error).split(" If reserved")[0]
            assert self.page.text(".reason") == said

    def free(self, address):
        self.held.remove(address)
        self.memory.free(address)
        self.page.click(f"button[data-address='{address}']")

    def empty(self):
        self.memory.empty_cache()
        self.page.click(".empty")

    def agree(self):
        assert sorted(drawn(self.page)) == sorted(segments(self.memory))
        allocated, reserved = self.memory.allocated, self.memory.reserved
        assert self.page.figures() == {
            "allocated": allocated,
            "reserved": reserved,
            "device": reserved + TOY.context,
            "peak": self.memory.stats()["allocated_bytes"]["all"]["peak"],
        }


def test_it_does_what_the_allocator_does_for_250_actions(page):
    draw, both = random.Random(2), Both(page)
    for _ in range(250):
        action = draw.random()
        if action < 0.55 or not both.held:
            both.allocate(draw.choice(SIZES))
        elif action < 0.95:
            both.free(draw.choice(both.held))
        elif action < 0.98:
            for address in list(both.held):
                both.free(address)
        else:
            both.empty()
        both.agree()
    assert both.failed > 5 and both.memory.retries > both.failed  # it helped


def test_the_story_ends_without_room_but_with_free_memory(page):
    page.click(".story")
    found = page.figures()
    assert found["reserved"] - found["allocated"] > 50 * MiB
    assert "Tried to allocate 16.00 MiB" in page.text(".reason")
    assert "in pieces of at most 12 MiB" in page.said()
    page.click(".all")
    page.click(".empty")
    assert page.figures()["reserved"] == 0 and drawn(page) == []


def test_each_size_has_a_button_and_nonsense_is_told(page):
    page.click(".again")
    for size in (0, 1, 2):
        page.click(".sizes button", size)
    assert [size for _, size, _ in drawn(page)] == [2 * MiB, 20 * MiB]
    before = page.figures()
    for wrong in ("", "-1", "2000000"):
        page.set("mib", wrong)
        page.click(".allocate")
        assert "allowed are 0 to 1,000,000 MiB" in page.said() and page.figures() == before


def test_the_keyboard_stays_where_it_was(page):
    page.click(".again")
    for _ in range(3):
        page.click(".sizes button", 2)
    page.run("panel.querySelectorAll('.blocks button')[1].focus()")
    page.run("document.activeElement.click()")
    assert page.run("document.activeElement.dataset.name") == "C"
    page.run("document.activeElement.click()")
    page.run("document.activeElement.click()")
    assert page.run("document.activeElement.className") == "allocate"
    page.set("mib", "2")
    page.run("panel.querySelector('[name=mib]').focus()")
    page.press("Enter", windowsVirtualKeyCode=13)
    assert page.figures()["allocated"] == 2 * MiB
