"""Checks of hashes and namespaces: by the wire alone, and by the tokens that the driver declares."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.contract.rules import Report

#: Pages whose hashes are remembered; further ones are not checked.
PAGES_MAX = 262_144
#: Namespace and content.
Domain = tuple[bytes, bytes]


@dataclass(frozen=True)
class Prompt:
    """A prompt that the driver declares: its tokens, and the space of models and salts in which it is computed."""

    name: str
    space: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Page:
    prompt: str
    position: int
    space: str
    #: Digests of the tokens before the page, up to its end, and of its own.
    before: bytes
    prefix: bytes
    own: bytes


class HashChecks:
    """See the module's docstring. For the server's thread."""

    def __init__(self, report: Report):
        self._report = report
        #: The prompt that is computed now, and whether no sequence of it was seen yet.
        self._prompt: Prompt | None = None
        self._begins = False
        #: The hash before each hash; empty before the first one.
        self._before: dict[tuple[Domain, bytes], bytes] = {}
        self._by_prefix: dict[tuple[str, bytes], tuple[Domain, bytes]] = {}
        self._by_hash: dict[tuple[Domain, bytes], _Page] = {}
        self._by_before: dict[tuple[str, bytes], bytes] = {}
        self._by_own: dict[tuple[str, bytes], bytes] = {}
        self._spaces: dict[bytes, str] = {}

    def begin(self, prompt: Prompt | None) -> None:
        """Sequences from now on are of this prompt; with None, of undeclared ones."""
        self._prompt, self._begins = prompt, True

    def sequence(
        self, domain: Domain, hashes: Sequence[bytes], page_tokens: int, number: int, *, may_be_tail: bool
    ) -> None:
        """Checks the hashes of a sequence, from its first page on.

        ``may_be_tail``: the first hash may be that of a later page, so that it says nothing of those before it.
        """
        before = None if may_be_tail else b""
        for position, page_hash in enumerate(hashes):
            key = domain, page_hash
            known = self._before.get(key)
            if before is None:
                pass
            elif known is None:
                if len(self._before) < PAGES_MAX:
                    self._before[key] = before
            elif known != before:
                text = (
                    f"page {position} has hash {page_hash.hex()[:16]}..., which had "
                    f"{_shown(known)} before it, and has {_shown(before)}"
                )
                self._report.broken("hashes-chained", text, number)
                return
            before = page_hash
        if self._prompt is not None and page_tokens > 0 and hashes:
            first = self._first(domain, hashes[0], may_be_tail)
            self._begins = False
            if first is not None:
                self._declared(self._prompt, domain, first, hashes, page_tokens, number)

    def _first(self, domain: Domain, page_hash: bytes, may_be_tail: bool) -> int | None:
        """Returns the position of a sequence's first hash in the prompt; None where it is not known."""
        if self._begins or not may_be_tail:
            return 0
        page = self._by_hash.get((domain, page_hash))
        return page.position if page else None

    def _declared(
        self, prompt: Prompt, domain: Domain, first: int, hashes: Sequence[bytes], page_tokens: int, number: int
    ) -> None:
        digest = hashlib.sha256()
        prefix = digest.digest()
        for position in range(min(first + len(hashes), len(prompt.tokens) // page_tokens)):
            if len(self._by_hash) >= PAGES_MAX:
                return
            tokens = prompt.tokens[position * page_tokens : (position + 1) * page_tokens]
            own = repr(tokens).encode()
            digest.update(own)
            before, prefix = prefix, digest.digest()
            if position >= first:
                page = _Page(prompt.name, position, prompt.space, before, prefix, hashlib.sha256(own).digest())
                self._page(page, domain, hashes[position - first], number)

    def _page(self, page: _Page, domain: Domain, page_hash: bytes, number: int) -> None:
        report, here = self._report, f"page {page.position} of prompt {page.prompt!r}"
        known = self._by_hash.setdefault((domain, page_hash), page)
        there = f"page {known.position} of prompt {known.prompt!r}"
        if known.space != page.space:
            text = f"{here} in space {page.space!r} has content, namespace and hash of {there} in space {known.space!r}"
            report.broken("spaces-apart", text, number)
            return
        if known.prefix != page.prefix:
            rule = "hashes-chained" if known.own == page.own else "hashes-cover-tokens"
            report.broken(rule, f"{here} has the hash of {there}, and the tokens up to its end differ", number)
            return
        first = self._by_prefix.setdefault((page.space, page.prefix), (domain, page_hash))
        if first != (domain, page_hash):
            what = "hash" if first[0] == domain else "namespace or content"
            text = f"{here} has another {what} than before, with the same tokens in space {page.space!r}"
            report.broken("hashes-repeat", text, number)
        elif known is not page:
            report.exercised("hashes-repeat")
        if self._by_before.setdefault((page.space, page.before), page.own) != page.own:
            report.exercised("hashes-cover-tokens")
        if self._by_own.setdefault((page.space, page.own), page.prefix) != page.prefix:
            report.exercised("hashes-chained")
        if self._spaces.setdefault(page.prefix, page.space) != page.space:
            report.exercised("spaces-apart")


def _shown(page_hash: bytes) -> str:
    return f"{page_hash.hex()[:16]}..." if page_hash else "no page"
