//! Limits of the time that frames wait to be written.

use tokio::io::DuplexStream;
use tokio::time::sleep;

use super::*;

const SLOW_AFTER: Duration = Duration::from_secs(10);
/// Room between both sides.
const ROOM: usize = 1024;

fn bench() -> (FrameWriter<DuplexStream>, DuplexStream) {
    let (write, read) = tokio::io::duplex(ROOM);
    (FrameWriter::new(write, SLOW_AFTER), read)
}

/// Reads what there is room for, and pauses.
async fn read_with_pauses(read: &mut DuplexStream, pause: Duration) -> io::Error {
    loop {
        sleep(pause).await;
        if let Err(error) = read.read(&mut [0; ROOM]).await {
            return error;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_waits_too_long_ends_the_connection_however_often_some_of_it_is_read() {
    for bytes in [ROOM * 16, CHUNK_BYTES * 2] {
        let (mut writer, mut read) = bench();
        let begun = Instant::now();
        let waited = SLOW_AFTER * 2;
        let sending = async {
            writer.queued(begun - waited);
            writer.frame(Frame::new("h", vec![1; bytes])).await?;
            // Its due is not put off by a frame that was queued later.
            writer.queued(Instant::now());
            writer.frame(Frame::new("h", "later")).await?;
            writer.flush().await
        };
        let end = tokio::select! {
            end = sending => end,
            error = read_with_pauses(&mut read, SLOW_AFTER - Duration::from_secs(1)) => panic!("{error}"),
        };
        assert!(matches!(end, Err(StreamEnd::Slow)), "{end:?}");
        assert_eq!(begun.elapsed(), SLOW_AFTER * WAIT_FACTOR - waited);
    }
}

#[tokio::test(start_paused = true)]
async fn frames_that_wait_a_short_time_each_are_sent_for_any_time() {
    let (mut writer, mut read) = bench();
    let begun = Instant::now();
    let sending = async {
        while begun.elapsed() < SLOW_AFTER * WAIT_FACTOR * 4 {
            writer.queued(Instant::now());
            writer.frame(Frame::new("h", vec![1; ROOM * 4])).await?;
        }
        writer.flush().await
    };
    tokio::select! {
        end = sending => end.expect("never slow"),
        error = read_with_pauses(&mut read, Duration::from_millis(500)) => panic!("{error}"),
    }
}

fn pong(writer: &mut FrameWriter<DuplexStream>) {
    let ping = Ping::default();
    ping.put(PingContext {
        bytes: [0; _],
        len: 0,
    });
    writer.pong(&ping);
}

/// Sends a frame that fills the pipe, long after others, and reads it after this time.
async fn sent_after(wait: Duration, pongs: bool, since: Instant) -> Result<(), StreamEnd> {
    let (mut writer, mut read) = bench();
    let early = Instant::now();
    // A frame that the buffer collects, and one that passes it and leaves nothing to flush.
    for bytes in [ROOM, CHUNK_BYTES * 2] {
        writer.queued(early);
        tokio::select! {
            sent = async {
                writer.frame(Frame::new("h", vec![1; bytes])).await?;
                match bytes {
                    ROOM => writer.flush().await,
                    _ => Ok(()),
                }
            } => sent?,
            error = read_with_pauses(&mut read, Duration::from_millis(1)) => panic!("{error}"),
        }
    }
    sleep(SLOW_AFTER * WAIT_FACTOR * 2).await;
    if pongs {
        pong(&mut writer);
    }
    writer.queued(since);
    writer.frame(Frame::new("h", vec![1; ROOM * 2])).await?;
    if pongs {
        pong(&mut writer);
    }
    tokio::select! {
        sent = writer.flush() => sent,
        error = async {
            sleep(wait).await;
            read_with_pauses(&mut read, Duration::from_millis(1)).await
        } => panic!("{error}"),
    }
}

#[tokio::test(start_paused = true)]
async fn pongs_and_earlier_frames_change_no_limit() {
    let soon = SLOW_AFTER / 2;
    for pongs in [false, true] {
        let now = Instant::now() + SLOW_AFTER * WAIT_FACTOR * 3;
        let sent = sent_after(soon, pongs, now).await;
        sent.expect("has not waited long");
        let before = Instant::now();
        let sent = sent_after(soon, pongs, before).await;
        assert!(matches!(sent, Err(StreamEnd::Slow)), "{sent:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pong_after_the_last_frame_has_a_limit_of_its_own() {
    for bytes in [ROOM / 2, CHUNK_BYTES * 2] {
        let (mut writer, mut read) = bench();
        writer.queued(Instant::now());
        tokio::select! {
            sent = async {
                writer.frame(Frame::new("h", vec![1; bytes])).await?;
                writer.flush().await
            } => sent.expect("sent"),
            error = read_with_pauses(&mut read, Duration::from_millis(1)) => panic!("{error}"),
        }
        sleep(SLOW_AFTER * WAIT_FACTOR * 2).await;
        for _ in 0..ROOM {
            pong(&mut writer);
        }
        tokio::select! {
            sent = writer.flush() => sent.expect("has not waited long"),
            error = async {
                sleep(SLOW_AFTER / 2).await;
                read_with_pauses(&mut read, Duration::from_millis(1)).await
            } => panic!("{error}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_old_frame_is_sent_where_there_is_room() {
    let (mut writer, mut read) = bench();
    sleep(SLOW_AFTER * WAIT_FACTOR * 2).await;
    writer.queued(Instant::now() - SLOW_AFTER * WAIT_FACTOR - SLOW_AFTER);
    writer
        .frame(Frame::new("h", "body"))
        .await
        .expect("collected");
    writer.flush().await.expect("sent");
    assert!(read.read(&mut [0; ROOM]).await.expect("read") > 4);
}
