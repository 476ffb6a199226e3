//! Detects the end of a process, even when its connections stay open in its children.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

/// A watch on a process, which stops when dropped.
#[derive(Debug)]
pub(super) struct ProcessWatch(JoinHandle<()>);

impl ProcessWatch {
    /// Calls `ended` once the process has ended. `None` where that cannot be observed: in another PID namespace, or on
    /// a system without pidfds. Needs a tokio runtime.
    pub(super) fn start(pid: i32, ended: impl FnOnce() + Send + 'static) -> Option<Self> {
        let pid = Pid::from_raw(pid)?;
        let process: Option<AsyncFd<OwnedFd>> = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => Some(registered(fd)?),
            Err(rustix::io::Errno::SRCH) => None,
            Err(error) => {
                tracing::debug!(%error, "a process cannot be watched");
                return None;
            }
        };
        Some(Self(tokio::spawn(async move {
            if let Some(process) = process
                && let Err(error) = process.readable().await
            {
                tracing::debug!(%error, "a process cannot be watched any longer");
                return;
            }
            ended();
        })))
    }
}

#[expect(
    deprecated,
    reason = "its successor asks for what an owned descriptor that nobody else has fulfils, in a way that safe code cannot say"
)]
fn registered(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd).ok()
}

impl Drop for ProcessWatch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let mut child = Command::new("cat");
        let mut child = child.stdin(Stdio::piped()).spawn().expect("it runs");
        let pid = i32::try_from(child.id()).expect("small");
        let (say, mut said) = oneshot::channel();
        let watch = ProcessWatch::start(pid, move || say.send(()).expect("somebody waits"));
        let _watch = watch.expect("a child can be watched");
        tokio::task::yield_now().await;
        assert!(said.try_recv().is_err(), "it lives");
        child.kill().expect("it lives");
        tokio::time::timeout(TEST_TIMEOUT, said)
            .await
            .expect("in time")
            .expect("said");
        child.wait().expect("it has ended");
        let (say, said) = oneshot::channel();
        let _watch = ProcessWatch::start(pid, move || say.send(()).expect("somebody waits"));
        let late = tokio::time::timeout(TEST_TIMEOUT, said).await;
        late.expect("in time").expect("said of one that is gone");
    }

    #[tokio::test]
    async fn a_missing_process_is_not_watched() {
        assert!(ProcessWatch::start(0, || ()).is_none());
    }
}
