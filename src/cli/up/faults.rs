//! Any call of `up` to the system may fail: `up` goes on, or ends in order with an error that names the call.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{mpsc, watch};

use super::system::{Launch, System};
use super::{Plan, supervise};
use crate::config::{Config, Flags};
use crate::error::CommandError;
use kvferry_memory::{BufferError, Depot, DepotError};
use kvferry_transport::{DirectoryLock, TransportError};

/// Errors of calls that a lack of something causes, that pass or do not, and that the present code has no case for.
const ERRNOS: [Errno; 7] = [
    Errno::AGAIN,
    Errno::MFILE,
    Errno::NFILE,
    Errno::NOMEM,
    Errno::ACCESS,
    Errno::IO,
    Errno::CHILD,
];
const KILLED: i32 = 9;
/// Children of each `up` here.
const ROLES: [&str; 4] = ["leader", "worker 0", "worker 1", "monitor"];

/// Calls that fail: the numbers of the first one and of the one after the last, and the error.
type Faults = Vec<(usize, usize, Errno)>;

/// A child that runs or has ended.
struct Process {
    role: String,
    end: watch::Sender<Option<ExitStatus>>,
    says: mpsc::Sender<String>,
}

#[derive(Default)]
struct World {
    faults: Faults,
    calls: usize,
    /// Number of calls when all children had started.
    complete_at: Option<usize>,
    processes: Vec<Process>,
    /// The memory of each worker, by its file.
    memory: BTreeMap<String, u64>,
    problems: Vec<String>,
    /// How long a child takes to end when that is requested.
    takes: BTreeMap<&'static str, Duration>,
}

impl World {
    fn running(&self, role: &str) -> Option<&Process> {
        let mut processes = self.processes.iter();
        processes.find(|process| process.role == role && process.end.borrow().is_none())
    }

    fn expect_all(&mut self) {
        for role in ROLES {
            if self.running(role).is_none() {
                self.problems.push(format!("no {role} runs"));
            }
        }
    }

    fn kill(&self, role: &str, raw_status: i32) {
        if let Some(process) = self.running(role) {
            process
                .end
                .send_replace(Some(ExitStatus::from_raw(raw_status)));
        }
    }
}

#[derive(Clone, Default)]
struct Fake(Rc<RefCell<World>>);

/// A child, by its number. Dropping it kills it.
struct FakeChild(Fake, usize);

impl FakeChild {
    fn end(&self, status: ExitStatus) {
        let world = self.0.0.borrow();
        world.processes[self.1].end.send_if_modified(|end| {
            let runs = end.is_none();
            *end = end.or(Some(status));
            runs
        });
    }
}

impl Drop for FakeChild {
    fn drop(&mut self) {
        self.end(ExitStatus::from_raw(KILLED));
    }
}

impl Fake {
    /// Counts a call, which fails if that was drawn.
    fn call(&self) -> Result<(), Errno> {
        let mut world = self.0.borrow_mut();
        let number = world.calls;
        world.calls += 1;
        let mut faults = world.faults.iter();
        match faults.find(|(first, after, _)| (*first..*after).contains(&number)) {
            Some((_, _, errno)) => Err(*errno),
            None => Ok(()),
        }
    }
}

impl System for Fake {
    type Child = FakeChild;
    type Reports = DuplexStream;

    fn lock(&self, directory: &Path, name: &str) -> Result<DirectoryLock, TransportError> {
        self.call().map_err(|errno| TransportError::Io {
            what: "cannot lock",
            path: directory.join(name),
            source: errno.into(),
        })?;
        DirectoryLock::take(directory, name)
    }

    fn create_depot(&self, bytes: u64) -> Result<Depot, DepotError> {
        self.call().map_err(|errno| BufferError::Io {
            action: "create memory",
            source: errno.into(),
        })?;
        Depot::create(bytes)
    }

    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        self.call()?;
        TcpListener::bind(address)
    }

    fn clone_fd(&self, fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        self.call()?;
        fd.try_clone_to_owned()
    }

    fn replace(&self, _: &Path, _: &str) -> io::Result<()> {
        Ok(self.call()?)
    }

    fn spawn(&self, launch: Launch) -> io::Result<(FakeChild, Option<DuplexStream>)> {
        self.call()?;
        let word = |name: &str| {
            let mut words = launch.arguments.iter().skip_while(|word| *word != name);
            words.nth(1).and_then(|word| word.to_str())
        };
        let mut role = launch.arguments[0].to_str().expect("UTF-8").to_owned();
        role.extend(word("--rank").map(|rank| format!(" {rank}")));
        let mut world = self.0.borrow_mut();
        if world.running(&role).is_some() {
            world.problems.push(format!("two processes are the {role}"));
        }
        if let Some(depot) = &launch.depot {
            let file = rustix::fs::fstat(depot.as_fd()).expect("a file").st_ino;
            let first = *world.memory.entry(role.clone()).or_insert(file);
            if first != file {
                world.problems.push(format!("{role} has lost its memory"));
            }
        } else if role.starts_with("worker") {
            world.problems.push(format!("{role} has no memory"));
        }
        let (end, _) = watch::channel(None);
        let (says, mut lines) = mpsc::channel::<String>(8);
        let (mut output, reports) = duplex(64);
        let mut ends = end.subscribe();
        tokio::spawn(async move {
            loop {
                let line = tokio::select! {
                    line = lines.recv() => line,
                    ended = ends.changed() => ended.ok().and(None),
                };
                let Some(line) = line else { return };
                if output.write_all(line.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        says.try_send("ready\n".to_owned()).expect("room");
        world.processes.push(Process { role, end, says });
        if ROLES.iter().all(|role| world.running(role).is_some()) {
            let calls = world.calls;
            world.complete_at.get_or_insert(calls);
        }
        let child = FakeChild(self.clone(), world.processes.len() - 1);
        Ok((child, launch.output.is_none().then_some(reports)))
    }

    fn pid(&self, child: &FakeChild) -> Option<u32> {
        u32::try_from(child.1 + 1).ok()
    }

    async fn wait(&self, child: &mut FakeChild) -> io::Result<ExitStatus> {
        self.call()?;
        let mut end = self.0.borrow().processes[child.1].end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        Ok(ended.expect("a process").expect("it has ended"))
    }

    async fn end(&self, child: &mut FakeChild) -> io::Result<()> {
        // Its input is closed, whether the byte before that was written or not.
        let takes = {
            let world = self.0.borrow();
            let role = world.processes[child.1].role.as_str();
            world.takes.get(role).copied()
        };
        match takes {
            None => child.end(ExitStatus::from_raw(0)),
            Some(takes) => {
                let end = self.0.borrow().processes[child.1].end.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(takes).await;
                    end.send_if_modified(|end| {
                        let runs = end.is_none();
                        *end = end.or(Some(ExitStatus::from_raw(0)));
                        runs
                    });
                });
            }
        }
        Ok(self.call()?)
    }

    fn kill(&self, child: &mut FakeChild) -> io::Result<()> {
        self.call()?;
        child.end(ExitStatus::from_raw(KILLED));
        Ok(())
    }
}

fn config(sockets: &Path) -> Config {
    let flags = Flags {
        ranks: Some(2),
        g2: Some("1MiB".parse().expect("a size")),
        monitor: Some("0".to_owned()),
        socket_dir: Some(sockets.to_owned()),
        ..Flags::default()
    };
    Config::load_with(None, [], &flags).expect("a configuration")
}

/// Runs an `up` whose children die, and which is ended at last. Returns its result and the world after it.
fn run(world: World) -> (Result<(), CommandError>, World) {
    let folder = tempfile::tempdir().expect("a directory");
    let system = Fake(Rc::new(RefCell::new(world)));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build();
    let ended = runtime.expect("a runtime").block_on(async {
        let (request, requested) = watch::channel(false);
        let plan = Plan {
            config: config(&folder.path().join("s")),
            remote: None,
            no_tiers: false,
        };
        let requests = async || {
            let mut requested = requested.clone();
            requested.wait_for(|now| *now).await.expect("a sender");
        };
        let up = supervise(system.clone(), plan, requests);
        let deaths = async {
            let second = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
            for role in ROLES {
                second(20).await;
                system.0.borrow().kill(role, KILLED);
                second(1).await;
                system.0.borrow().kill(role, 1 << 8);
            }
            second(20).await;
            let leader = system
                .0
                .borrow()
                .running("leader")
                .map(|leader| leader.says.clone());
            if let Some(leader) = leader {
                leader
                    .try_send("nonsense\nfence 0 1\n".to_owned())
                    .expect("room");
            }
            // Longer than all pauses after failed starts.
            second(600).await;
            system.0.borrow_mut().expect_all();
            request.send_replace(true);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = up => ended,
            () = deaths => unreachable!("it never ends"),
        }
    });
    let world = Rc::try_unwrap(system.0);
    (
        ended,
        world.ok().expect("all children are dropped").into_inner(),
    )
}

/// Checks one run.
fn check(faults: Faults) -> World {
    let (ended, world) = run(World {
        faults,
        ..World::default()
    });
    let faults = &world.faults;
    assert_eq!(world.problems, [""; 0], "{faults:?}");
    for role in ROLES {
        assert!(world.running(role).is_none(), "{role} is left: {faults:?}");
    }
    let after_start = |at: usize| faults.iter().all(|(first, ..)| *first >= at);
    match ended {
        Ok(()) => {}
        Err(error) => {
            assert!(
                !world.complete_at.is_some_and(after_start),
                "a running `up` has ended: {faults:?}: {error}"
            );
            let text = error.to_string();
            let names = [
                "up.lock",
                "g2 is",
                "monitor is",
                "leader: ",
                "worker of rank",
            ];
            let errno = |(.., errno): &(usize, usize, Errno)| {
                text.contains(&format!("(os error {})", errno.raw_os_error()))
            };
            assert!(
                names.iter().any(|name| text.contains(name)) && faults.iter().any(errno),
                "{faults:?}: {text}"
            );
        }
    }
    world
}

#[test]
fn whichever_call_fails_up_goes_on_or_ends_in_order_and_names_it() {
    let calls = check(Vec::new()).calls;
    assert!(calls > 50, "the children die");
    for errno in ERRNOS {
        for call in 0..calls {
            check(vec![(call, call + 1, errno)]);
        }
    }
    let mut rng = fastrand::Rng::with_seed(48);
    for _ in 0..200 {
        let mut fault = || {
            let first = rng.usize(0..calls);
            let errno = ERRNOS[rng.usize(0..ERRNOS.len())];
            (first, first + rng.usize(1..40), errno)
        };
        let faults = vec![fault(), fault()];
        check(faults);
    }
}

#[test]
fn a_child_that_does_not_end_costs_no_other_its_time() {
    for stopped in ["leader", "worker 0"] {
        let takes = [
            (stopped, Duration::from_secs(86_400)),
            ("worker 1", Duration::from_secs(9)),
        ];
        let (ended, world) = run(World {
            takes: takes.into(),
            ..World::default()
        });
        ended.expect("an end in order");
        let how = |role: &str| {
            let mut of_role = world.processes.iter().filter(|found| found.role == role);
            let last = of_role.next_back().expect("a process");
            last.end.borrow().map(|status| status.into_raw())
        };
        assert_eq!(how(stopped), Some(KILLED));
        assert_eq!(how("worker 1"), Some(0), "{stopped} does not end");
    }
}
