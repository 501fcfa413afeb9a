"""The coming prefixes: blocks of placed prompts that their instances have yet to compute and store.

Algorithm 1 "updates the cache" when it places a prompt (Mooncake, section 6.1). The prefix index learns of
blocks only when they have been stored. Without this module a burst of prompts with one new prefix would be
spread over many instances, and each of them would compute that prefix.

There is a radix tree for each priority. A node has blocks that several prompts have in common; they follow
the blocks of its parent node. Keys are chained, so the end of two prompts' common prefix is found by
bisection: an edge of thousands of blocks costs a dozen comparisons. Nodes refer to the prompts' own keys, and
there are fewer than two nodes for each prompt: memory is bounded by the number of placed prompts.

Owns: these trees. Does not know: which blocks are stored, what a placement is.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.messages.blocks import BlockKey

EVENT_DELAY_S = 0.5
"""Seconds after the end of a prefill in which its blocks still count as coming.

KV events report the blocks in this time.
"""

Coming = list[tuple[int, int]]
"""Numbers of a prompt's leading blocks, each with a mask of the slots that will hold at least so many.

With `[(4, 0b011), (9, 0b001)]` slot 0 will hold nine leading blocks, and slot 1 will hold four.
"""


@dataclass(slots=True, eq=False)
class ComingPrompt:
    """One placed prompt with its block keys."""

    slot: int
    """The slot of the instance that computes the prompt."""
    priority: int
    keys: Sequence[BlockKey]
    is_coming: bool = True
    """Whether the prompt is in the tree of its priority. A prompt without blocks is never in it."""


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the radix tree: blocks `[start, end)`, which all prompts through the node have in common.

    `keys` are all keys of one of these prompts.
    """

    keys: Sequence[BlockKey]
    start: int
    end: int
    num_prompts: Counter[int]
    """The number of prompts that pass through this node or end in it, by slot. No entry is 0."""
    mask: int
    """The bit mask of the slots in `num_prompts`."""
    children: "dict[BlockKey, _Node]" = field(default_factory=dict)
    """The child nodes by the key of their first block."""

    def common_end(self, keys: Sequence[BlockKey]) -> int:
        """Return the end of the blocks that this node and `keys` have in common.

        They must have the node's first block in common.
        """
        end = min(self.end, len(keys))
        if self.keys[end - 1] == keys[end - 1]:
            return end
        return bisect_left(range(end), True, lo=self.start + 1, key=lambda i: self.keys[i] != keys[i])

    def add(self, slot: int) -> None:
        """Count one more prompt of an instance, given by its slot."""
        self.num_prompts[slot] += 1
        self.mask |= 1 << slot

    def remove(self, slot: int) -> None:
        """Stop counting one prompt of an instance, given by its slot."""
        self.num_prompts[slot] -= 1
        if not self.num_prompts[slot]:
            del self.num_prompts[slot]
            self.mask ^= 1 << slot

    def split(self, end: int) -> None:
        """Split the node at block `end`: the blocks from `end` on move to a new child node."""
        rest = _Node(self.keys, end, self.end, self.num_prompts.copy(), self.mask, self.children)
        self.end, self.children = end, {self.keys[end]: rest}

    def join(self) -> None:
        """Merge the node with its only child if no prompt ends between the two."""
        if len(self.children) == 1:
            (child,) = self.children.values()
            if child.num_prompts == self.num_prompts:
                self.keys, self.end, self.children = child.keys, child.end, child.children


class ComingPrefixes:
    """All placed prompts whose blocks are not stored yet."""

    def __init__(self) -> None:
        self._roots: dict[int, dict[BlockKey, _Node]] = {}
        """The first nodes, by priority and by the key of their first block."""
        self._coming: dict[int, set[ComingPrompt]] = {}
        """The prompts by slot."""
        self._ended: deque[tuple[float, ComingPrompt]] = deque()
        """Prompts whose prefill has ended, each with the time at which it is removed."""

    def add(self, slot: int, priority: int, keys: Sequence[BlockKey]) -> ComingPrompt:
        """Add a prompt that has been placed on the instance in `slot`."""
        prompt = ComingPrompt(slot, priority, keys, is_coming=bool(keys))
        if not keys:
            return prompt
        self._coming.setdefault(slot, set()).add(prompt)
        nodes, start = self._roots.setdefault(priority, {}), 0
        while start < len(keys):
            node = nodes.get(keys[start])
            if node is None:
                nodes[keys[start]] = _Node(keys, start, len(keys), Counter({slot: 1}), 1 << slot)
                break
            end = node.common_end(keys)
            if end < node.end:
                node.split(end)
            node.add(slot)
            nodes, start = node.children, end
        return prompt

    def remove(self, prompt: ComingPrompt) -> None:
        """Remove a prompt whose blocks are stored, or that its instance will not compute. Idempotent."""
        if not prompt.is_coming:
            return
        prompt.is_coming = False
        self._coming[prompt.slot].discard(prompt)
        keys, start = prompt.keys, 0
        nodes, parent = self._roots[prompt.priority], None
        while start < len(keys):
            node = nodes[keys[start]]
            node.remove(prompt.slot)
            if not node.mask:  # then no child has a prompt either
                del nodes[keys[start]]
                break
            nodes, parent, start = node.children, node, node.end
        if parent is not None:
            parent.join()
        if not self._roots[prompt.priority]:
            del self._roots[prompt.priority]

    def stored(self, prompt: ComingPrompt, now_s: float) -> None:
        """Record that a prompt's prefill has ended.

        The prompt is removed `EVENT_DELAY_S` later, as KV events should have reported its blocks by then.
        """
        self._ended.append((now_s + EVENT_DELAY_S, prompt))

    def forget(self, slot: int) -> None:
        """Remove the prompts of an instance that has left its slot."""
        for prompt in list(self._coming.get(slot, ())):
            self.remove(prompt)

    def match(self, keys: Sequence[BlockKey], priority: int, now_s: float) -> Coming:
        """Return the leading blocks of a prompt that are coming, with the slots that will hold them.

        Only prompts with the same or a lower priority number count, as they are computed before this prompt.
        """
        while self._ended and self._ended[0][0] <= now_s:
            self.remove(self._ended.popleft()[1])
        coming: Coming = []
        for level, nodes in self._roots.items():
            if level <= priority:
                coming += _match(nodes, keys)
        return coming


def _match(nodes: dict[BlockKey, _Node], keys: Sequence[BlockKey]) -> Coming:
    coming: Coming = []
    start = 0
    while start < len(keys) and (node := nodes.get(keys[start])) is not None:
        end = node.common_end(keys)
        if coming and coming[-1][1] == node.mask:
            coming.pop()
        coming.append((end, node.mask))
        if end < node.end:
            break
        nodes, start = node.children, end
    return coming
