"""The messages between the two sides of the connector in each step of the engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every rank."""

    #: Number of the last step with work, this one or an earlier one, drawn from the ids of kvferry requests. Stores
    #: with a lower id read pages that this or an earlier step writes; loads that name it overwrite such pages.
    written_through: int = 0
    #: The highest number up to which stores and loads wait for the work of earlier steps; and the highest of all.
    needed_before: int = 0
    needed_through: int = 0
    #: Engine requests whose loads are over, on every rank.
    loaded: list[str] = field(default_factory=list)
    #: Pages of those that were not loaded.
    failed_pages: list[int] = field(default_factory=list)
    #: Those of which all pages must be computed, also the ones that the device had.
    failed: list[str] = field(default_factory=list)
    #: Ids of kvferry requests whose pages the engine takes back.
    abandon: list[int] = field(default_factory=list)
    #: Ids of kvferry requests, and for each the pages of some groups of which every rank takes checksums after its
    #: forward pass: a group and its pages, in turn.
    checksums: list[tuple[int, list[tuple[int, list[int]]]]] = field(default_factory=list)
    #: Groups and pages of them that were loaded with wrong bytes, to which every rank writes zeros. The engine computes
    #: them again, but some attention kernels multiply even what they mask: a wrong byte may be a NaN.
    zeroed: list[tuple[int, list[int]]] = field(default_factory=list)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler. ``over``: by request id, how many ranks confirm that its copies have ended."""

    over: dict[int, int]
    #: The failure of some rank: a hook's name, or :attr:`kvferry.rank.RankSession.fault`. Empty without one.
    fault: str = ""
    #: The ``written_through`` of the reported step; 0 if it was reported before. vLLM delivers the report with the
    #: results of the step, so that the step is over by then.
    stepped_through: int = 0
    #: By request id and rank: the rank's shard, and the checksums that were ordered, 8 bytes a page in the order's
    #: sequence; None if the rank could not take them.
    checksums: dict[int, dict[int, tuple[int, bytes | None]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        """Returns the sum of both reports."""
        assert isinstance(other, RankReport)
        total = dict(self.over)
        for request, ranks in other.over.items():
            total[request] = total.get(request, 0) + ranks
        checksums = {request: dict(ranks) for request, ranks in self.checksums.items()}
        for request, ranks in other.checksums.items():
            checksums.setdefault(request, {}).update(ranks)
        stepped = max(self.stepped_through, other.stepped_through)
        return RankReport(total, self.fault or other.fault, stepped, checksums)
