//! Operators: numbers of the copies, and probes.

use super::*;
use kvferry_protocol::{EdgeMeasure, Measure, MeasureAnswer, Probe, ProbeAnswer};

const OPERATOR: u64 = 9;

impl World {
    fn with_operator() -> Self {
        let mut world = Self::attached();
        world.connect_operator(OPERATOR);
        world.process.to_ranks.clear();
        world
    }

    fn connect_operator(&mut self, peer: u64) {
        let hello = Hello::new(Role::Admin, String::new());
        self.run(|shell, process| {
            shell.opened(process, PeerId(peer), &hello, Some(90));
            Ok(())
        });
    }

    fn probe(&mut self, peer: u64, id: u64) {
        self.send(peer, id, Message::Probe(Probe {}));
    }

    fn probed(&mut self, copied: Result<u64, &str>) {
        let copied = copied.map_err(str::to_owned);
        self.run(|shell, process| {
            shell.probed(process, copied);
            Ok(())
        });
    }

    /// The answers to operators since the last call: the peer, the request, and the bytes of the probe or the error.
    fn probe_answers(&mut self) -> Vec<(u64, u64, Result<u64, ErrorCode>)> {
        let sent = std::mem::take(&mut self.process.to_ranks);
        let sent = sent.into_iter().map(|(peer, request, message)| {
            let result = match message {
                Message::ProbeAnswer(ProbeAnswer { copied_bytes, .. }) => Ok(copied_bytes),
                Message::Error(error) => Err(error.code()),
                other => panic!("{} is no answer to a probe", other.kind().name()),
            };
            (peer.0, request.0, result)
        });
        sent.collect()
    }
}

#[test]
fn a_probe_is_answered_at_the_end_of_its_copy_and_one_copy_runs_at_a_time() {
    let mut world = World::with_operator();
    world.probe(OPERATOR, 1);
    world.probe(OPERATOR, 2);
    assert_eq!((world.probe_answers(), world.process.probes), (vec![], 1));
    world.probed(Ok(4096));
    let both = [(OPERATOR, 1, Ok(4096)), (OPERATOR, 2, Ok(4096))];
    assert_eq!(world.probe_answers(), both);
    world.probe(OPERATOR, 3);
    world.probed(Err("other bytes"));
    let failed = [(OPERATOR, 3, Err(ErrorCode::CopyFailed))];
    assert_eq!(
        (world.probe_answers(), world.process.probes),
        (failed.into(), 2)
    );
}

#[test]
fn a_probe_whose_copy_cannot_start_is_refused_and_the_next_one_starts_one() {
    let mut world = World::with_operator();
    world.process.probe_error = Some("no memory".to_owned());
    world.probe(OPERATOR, 1);
    assert_eq!(
        world.probe_answers(),
        [(OPERATOR, 1, Err(ErrorCode::CopyFailed))]
    );
    world.probe(OPERATOR, 2);
    assert_eq!((world.probe_answers(), world.process.probes), (vec![], 2));
}

#[test]
fn no_second_copy_starts_for_operators_that_left_and_their_probes_are_dropped() {
    let mut world = World::with_operator();
    world.probe(OPERATOR, 1);
    world.run(|shell, process| shell.closed(process, PeerId(OPERATOR)));
    world.connect_operator(10);
    world.probe(10, 1);
    assert_eq!(world.process.probes, 1, "the first copy still runs");
    world.probed(Ok(4096));
    assert_eq!(world.probe_answers(), [(10, 1, Ok(4096))]);
}

#[test]
fn at_most_64_probes_wait() {
    let mut world = World::with_operator();
    (1..=65).for_each(|id| world.probe(OPERATOR, id));
    assert_eq!(
        world.probe_answers(),
        [(OPERATOR, 65, Err(ErrorCode::Busy))]
    );
    world.probed(Ok(1));
    assert_eq!(world.probe_answers().len(), 64);
}

#[test]
fn an_operator_reads_the_copies_by_edge() {
    let mut world = World::with_operator();
    world.load(1);
    let measure = |world: &mut World| {
        world.send(OPERATOR, 1, Message::Measure(Measure {}));
        match world.process.to_ranks.pop() {
            Some((_, _, Message::MeasureAnswer(MeasureAnswer { edges, .. }))) => edges,
            other => panic!("{other:?}"),
        }
    };
    let running = EdgeMeasure {
        from: 2,
        to: 1,
        running: 1,
        ..EdgeMeasure::default()
    };
    let [edge] = &measure(&mut world)[..] else {
        panic!("one edge")
    };
    let numbers = |edge: &EdgeMeasure| EdgeMeasure {
        queue: Default::default(),
        copy: Default::default(),
        ..edge.clone()
    };
    assert_eq!(numbers(edge), running);
    assert_eq!(edge.copy.counts.iter().sum::<u64>(), 0);
    world.end_load();
    let [edge] = &measure(&mut world)[..] else {
        panic!("one edge")
    };
    let ended = EdgeMeasure {
        incomplete: 1,
        running: 0,
        ..running
    };
    assert_eq!(numbers(edge), ended);
    assert_eq!(edge.copy.counts.iter().sum::<u64>(), 1);
}

#[test]
fn an_operator_has_no_seat_of_a_rank() {
    let mut world = World::new();
    world.connect_operator(OPERATOR);
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    world.answer_memory(Ok(()));
    assert!(world.shell.is_used());
    world.run(|shell, process| shell.closed(process, PeerId(OPERATOR)));
    assert!(world.shell.is_used());
}
