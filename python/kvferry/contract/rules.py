"""Rules of the wire, and what was seen of each: kept, broken, or not exercised."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Most breaks of one rule that are kept with their text; further ones are counted. A text has at most 500 characters,
#: so that a report of 64 rules takes at most 640 KiB.
BREAKS_MAX = 20
_TEXT_MAX = 500


class Outcome(Enum):
    """The outcome of one rule. A rule that could not be observed is not exercised, and never kept."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_EXERCISED = "not exercised"


@dataclass(frozen=True)
class Rule:
    """A rule, and where ``docs/wire.md`` states it: a section, or the number in its section on conversations."""

    name: str
    text: str
    where: str


@dataclass(frozen=True)
class Break:
    """One violation, with the numbers of the messages that show it."""

    text: str
    messages: tuple[int, ...] = ()


@dataclass
class _Seen:
    exercised: int = 0
    broken: int = 0
    breaks: list[Break] = field(default_factory=list)


class Report:
    """What was seen of each rule. For one thread at a time."""

    def __init__(self, rules: Iterable[Rule]):
        self.rules = {rule.name: rule for rule in rules}
        self._seen = {name: _Seen() for name in self.rules}
        #: Remarks on the run as a whole, such as memory that could not be mapped.
        self.notes: list[str] = []

    def exercised(self, rule: str) -> None:
        """Records that the rule was observed once, and kept unless a break is recorded, too."""
        self._seen[rule].exercised += 1

    def broken(self, rule: str, text: str, *messages: int) -> None:
        """Records a violation."""
        seen = self._seen[rule]
        seen.broken += 1
        if len(seen.breaks) < BREAKS_MAX:
            seen.breaks.append(Break(text[:_TEXT_MAX], messages))

    def note(self, text: str) -> None:
        """Adds a remark, once."""
        if text not in self.notes and len(self.notes) < BREAKS_MAX:
            self.notes.append(text[:_TEXT_MAX])

    def outcome(self, rule: str) -> Outcome:
        """Returns the outcome of a rule."""
        seen = self._seen[rule]
        if seen.broken:
            return Outcome.BROKEN
        return Outcome.KEPT if seen.exercised else Outcome.NOT_EXERCISED

    def breaks(self, rule: str) -> list[Break]:
        """Returns the violations of a rule."""
        return self._seen[rule].breaks

    def named(self, outcome: Outcome) -> list[str]:
        """Returns the names of the rules with this outcome."""
        return [name for name in self.rules if self.outcome(name) is outcome]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken and at least one is kept."""
        return not self.named(Outcome.BROKEN) and bool(self.named(Outcome.KEPT))

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for JSON; ``docs/contract.md`` describes the fields."""
        rules = [
            {
                "rule": name,
                "outcome": self.outcome(name).value,
                "text": rule.text,
                "where": rule.where,
                "exercised": self._seen[name].exercised,
                "broken": self._seen[name].broken,
                "breaks": [{"text": each.text, "messages": list(each.messages)} for each in self.breaks(name)],
            }
            for name, rule in self.rules.items()
        ]
        return {"passed": self.passed, "rules": rules, "notes": self.notes}

    def as_json(self) -> str:
        """Returns the report as one line of JSON."""
        return json.dumps(self.as_dict())

    def as_text(self) -> str:
        """Returns one line for each rule, each followed by its breaks, and a summary."""
        width = max(len(name) for name in self.rules)
        lines = []
        for name, rule in self.rules.items():
            outcome = self.outcome(name)
            lines.append(f"{outcome.value:13}  {name:{width}}  {rule.text} (docs/wire.md, {rule.where})")
            for each in self.breaks(name):
                numbers = f" [messages {', '.join(map(str, each.messages))}]" if each.messages else ""
                lines.append(f"{'':15}{each.text}{numbers}")
            further = self._seen[name].broken - len(self.breaks(name))
            if further:
                lines.append(f"{'':15}and {further} more")
        lines += [f"note: {text}" for text in self.notes]
        lines.append(", ".join(f"{len(self.named(outcome))} {outcome.value}" for outcome in Outcome))
        return "\n".join(lines)
