"""The prefix cache: a radix tree over token ids, one per namespace, whose edges carry pages.

A key is what identifies a position: its token, or with a draft its token and the next one, because the draft's
K at a position is made of the next token.  Each page in the tree counts as one reference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

from memory import Memory

Keys = Sequence[Hashable]


@dataclasses.dataclass(eq=False)
class Node:
    """An edge of several pages and what follows it.

    Attributes:
        keys: ``[len(pages) * page]``.
        children: by the keys of their first page.
        used: when it was last wanted.
    """

    keys: list[Hashable]
    pages: list[int]
    parent: Node | None = None
    children: dict[tuple[Hashable, ...], Node] = dataclasses.field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Pages by what they hold."""

    def __init__(self, memory: Memory):
        self.memory, self.page = memory, memory.page
        self.roots: dict[int, Node] = {}
        self.clock = itertools.count(1)

    def match(self, namespace: int, keys: Keys) -> list[int]:
        """The pages of the longest known head of ``keys``, whole pages only."""
        pages: list[int] = []
        for node, count in self._walk(namespace, keys):
            node.used = next(self.clock)
            pages += node.pages[:count]
        return pages

    def insert(self, namespace: int, keys: Keys, pages: list[int]) -> None:
        """Remember pages, one for each ``page`` keys; what is known already stays as it is."""
        count = min(len(keys) // self.page, len(pages))
        node, known = self.roots.setdefault(namespace, Node([], [])), 0
        for child, matched in self._walk(namespace, keys[: count * self.page]):
            if matched < len(child.pages):
                child = self._split(child, matched)
            child.used = next(self.clock)
            node, known = child, known + matched
        if known < count:
            leaf = Node(list(keys[known * self.page : count * self.page]), pages[known:count], node)
            leaf.used = next(self.clock)
            node.children[self._first(leaf.keys)] = leaf
            self.memory.share(leaf.pages, None)

    def evict(self) -> list[int]:
        """Take the leaf that was not wanted for longest and that no request uses out of the tree: its pages.

        They still count as referenced.  Empty if there is no such leaf.
        """
        refs = self.memory.full.refs
        leaves = [n for n in self._nodes() if not n.children and all(refs[p] == 1 for p in n.pages)]
        if not leaves:
            return []
        oldest = min(leaves, key=lambda n: n.used)
        assert oldest.parent is not None
        del oldest.parent.children[self._first(oldest.keys)]
        return oldest.pages

    def _walk(self, namespace: int, keys: Keys) -> list[tuple[Node, int]]:
        """The nodes along ``keys``, each with how many of its pages agree; only the last may agree in part."""
        node, at, path = self.roots.get(namespace), 0, []
        while node is not None:
            node = node.children.get(self._first(keys[at:]))
            if node is None:
                break
            agree = 0
            while agree < len(node.pages) and self._page_of(keys, at, agree) == self._page_of(node.keys, 0, agree):
                agree += 1
            path.append((node, agree))
            at += agree * self.page
            if agree < len(node.pages):
                break
        return path

    def _split(self, node: Node, count: int) -> Node:
        """Cut an edge after ``count`` pages; the upper half."""
        at = count * self.page
        upper = Node(node.keys[:at], node.pages[:count], node.parent)
        assert node.parent is not None
        node.parent.children[self._first(upper.keys)] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[count:], upper
        upper.children[self._first(node.keys)] = node
        return upper

    def _first(self, keys: Keys) -> tuple[Hashable, ...]:
        return tuple(keys[: self.page])

    def _page_of(self, keys: Keys, start: int, number: int) -> tuple[Hashable, ...]:
        return tuple(keys[start + number * self.page : start + (number + 1) * self.page])

    def _nodes(self) -> list[Node]:
        found, todo = [], [c for root in self.roots.values() for c in root.children.values()]
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return found
