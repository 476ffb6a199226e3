//! The reports that children write on their standard output.

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::mpsc;

use crate::cli::shutdown::ChildReport;

/// Longest line that a child may write, in bytes.
const LINE_BYTES_MAX: u64 = 256;

/// A report, and the child that sent it.
pub(super) struct Reported {
    pub(super) index: usize,
    pub(super) pid: Option<u32>,
    pub(super) report: ChildReport,
}

/// Reads the reports of a child until its output ends. A line that cannot be parsed is logged and skipped.
pub(super) async fn listen(
    output: impl AsyncRead + Unpin,
    (index, pid): (usize, Option<u32>),
    reports: mpsc::Sender<Reported>,
) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = String::new();
        let mut limited = (&mut output).take(LINE_BYTES_MAX);
        match limited.read_line(&mut line).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, ?pid, "the reports of a child cannot be read");
                return;
            }
        }
        let Ok(report) = line.trim_end().parse() else {
            tracing::warn!(line, ?pid, "a child sent an unexpected line");
            continue;
        };
        let reported = Reported { index, pid, report };
        if reports.send(reported).await.is_err() {
            return;
        }
    }
}
