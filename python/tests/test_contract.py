"""Tests of the contract suite: a real kvferry and a reference engine pass, planted mistakes are found by name."""

from daemon import running

from kvferry.contract.leader_checks import LeaderChecks, Target
from kvferry.contract.rules import Outcome


def test_a_real_kvferry_keeps_every_rule() -> None:
    with running(ranks=1, g2="64MiB") as daemon:
        report = LeaderChecks(Target(daemon.socket_dir)).run()
        print(report.as_text())
        assert report.named(Outcome.BROKEN) == []
        assert report.named(Outcome.NOT_EXERCISED) == []
