"""What the two sides of the connector tell each other with each step of the engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every rank."""

    #: Number of the last step with work, this one or an earlier one, among the ids of kvferry requests. Stores with a
    #: lower id read what that step or an earlier one writes; loads that name it overwrite what those write.
    written_through: int = 0
    #: The last store that was asked for, at most ``written_through``.
    stores_through: int = 0
    #: Engine requests whose loads are over, on every rank.
    loaded: list[str] = field(default_factory=list)
    #: Pages of those that did not come whole.
    failed_pages: list[int] = field(default_factory=list)
    #: Those whose pages are all to be computed, also the ones that the device had.
    failed: list[str] = field(default_factory=list)
    #: kvferry requests whose pages the engine takes back.
    abandon: list[int] = field(default_factory=list)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler: how many of them know that nothing is copied for a request any more."""

    over: dict[int, int]
    #: What failed on some rank: a hook, or what :attr:`kvferry.rank.RankSession.fault` says.
    fault: str = ""
    #: The ``written_through`` of the step that this is the report of; 0 where it was reported before. vLLM hands the
    #: report over with what the step has computed, so that the step is over then.
    stepped_through: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        """Both together."""
        assert isinstance(other, RankReport)
        total = dict(self.over)
        for request, ranks in other.over.items():
            total[request] = total.get(request, 0) + ranks
        return RankReport(total, self.fault or other.fault, max(self.stepped_through, other.stepped_through))
