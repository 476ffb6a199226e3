//! The requests that a leader sends to `up`, on its standard output.

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::ChildStdout;
use tokio::sync::mpsc;

use crate::cli::shutdown::FenceWorker;

/// Longest line that the leader may write, in bytes.
const LINE_BYTES_MAX: u64 = 256;

/// Reads the requests of a leader until its output ends. A line that cannot be parsed is logged and skipped.
pub(super) async fn listen(output: ChildStdout, wants: mpsc::Sender<FenceWorker>) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = String::new();
        let mut limited = (&mut output).take(LINE_BYTES_MAX);
        match limited.read_line(&mut line).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "requests of the leader are silent");
                return;
            }
        }
        match line.trim_end().parse() {
            Ok(wanted) => {
                if wants.send(wanted).await.is_err() {
                    return;
                }
            }
            Err(()) => tracing::warn!(line, "the leader sent an unexpected message"),
        }
    }
}
