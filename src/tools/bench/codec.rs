//! `kvferry-tools bench codec`

use std::hint::black_box;
use std::time::Instant;

use kvferry::cli::bench::percentiles;
use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_protocol::{
    Envelope, Header, Message, TransferBody, TransferOrder, VERSION, decode, encode,
};
use kvferry_types::{Epoch, FragmentPair, PageList, RequestId};

/// Largest number of pages of a pair.
const PAIR_PAGES_MAX: u32 = 32;
/// Pages of the engine, from which each pair takes random ones.
const DEVICE_PAGES: u32 = 100_000;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pairs of the order, of 1 to 32 pages each.
    #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pairs: u32,
    /// Orders of each kind.
    #[arg(long, default_value = "2000", value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measurements of one order to load; times in microseconds.
#[derive(Debug, serde::Serialize)]
struct CodecReport {
    pairs: u32,
    pages: u64,
    body_bytes: usize,
    encode_p50_us: f64,
    decode_p50_us: f64,
    both_p50_us: f64,
    both_p99_us: f64,
    numbers_p50_us: f64,
    numbers_p99_us: f64,
    both_to_numbers: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let report = self.measure()?;
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "{} pairs with {} pages, {} bytes: encoded in {:.1} us, decoded in {:.1} us (p50)",
            report.pairs,
            report.pages,
            report.body_bytes,
            report.encode_p50_us,
            report.decode_p50_us
        ));
        print_line(&format!(
            "both {:.1} us (p99 {:.1}); its numbers alone, written and read {:.1} us (p99 {:.1}); {:.2} times that",
            report.both_p50_us,
            report.both_p99_us,
            report.numbers_p50_us,
            report.numbers_p99_us,
            report.both_to_numbers
        ));
        Ok(())
    }

    fn measure(&self) -> Result<CodecReport, CommandError> {
        let pairs = pairs(self.pairs);
        let pages = pairs.iter().map(|pair| pair.dst.pages()).sum();
        let numbers = numbers(&pairs);
        let envelope = order(pairs);
        let mut body_bytes = 0;
        let (mut encoded, mut decoded) = (Vec::new(), Vec::new());
        let (mut both, mut raw) = (Vec::new(), Vec::new());
        let warm_up = self.rounds / 10;
        for round in 0..self.rounds + warm_up {
            let begun = Instant::now();
            let (header, body) = encode(&envelope).map_err(CommandError::failed)?;
            let half = begun.elapsed();
            let header = Header::from_bytes(&header).map_err(CommandError::failed)?;
            let back = decode(header, &body).map_err(CommandError::failed)?;
            let complete = begun.elapsed();
            if back != envelope {
                return Err(CommandError::Failed("came back changed".to_owned()));
            }
            body_bytes = body.len();
            let begun = Instant::now();
            write_and_read(&numbers)?;
            let alone = begun.elapsed();
            if round >= warm_up {
                encoded.push(half.as_secs_f64() * 1e6);
                decoded.push((complete - half).as_secs_f64() * 1e6);
                both.push(complete.as_secs_f64() * 1e6);
                raw.push(alone.as_secs_f64() * 1e6);
            }
        }
        let (both_p50_us, both_p99_us) = percentiles(both);
        let (numbers_p50_us, numbers_p99_us) = percentiles(raw);
        Ok(CodecReport {
            pairs: self.pairs,
            pages,
            body_bytes,
            encode_p50_us: percentiles(encoded).0,
            decode_p50_us: percentiles(decoded).0,
            both_p50_us,
            both_p99_us,
            numbers_p50_us,
            numbers_p99_us,
            both_to_numbers: both_p50_us / numbers_p50_us,
        })
    }
}

/// An order to load these pairs.
pub(super) fn order(pairs: Vec<FragmentPair>) -> Envelope {
    Envelope {
        version: VERSION,
        correlation: RequestId(1),
        deadline_ms: 1000,
        epoch: Epoch(1),
        message: Message::Transfer(TransferOrder {
            group: 0,
            page_bytes: 2 << 20,
            from: 2,
            to: 1,
            engine: Some([7; 16]),
            request: 1 << 20,
            after: 0,
            transfers: vec![TransferBody {
                id: 1 << 20,
                pairs: pairs.into(),
                record: None,
            }],
        }),
    }
}

/// Pairs of a run of arena pages and as many random device pages.
pub(super) fn pairs(count: u32) -> Vec<FragmentPair> {
    let mut rng = fastrand::Rng::with_seed(3);
    let pairs = (0..count).map(|index| {
        let pages = rng.u32(1..=PAIR_PAGES_MAX);
        FragmentPair {
            src: PageList::run(index * PAIR_PAGES_MAX, pages),
            dst: (0..pages).map(|_| rng.u32(0..DEVICE_PAGES)).collect(),
        }
    });
    pairs.collect()
}

fn numbers(pairs: &[FragmentPair]) -> Vec<u32> {
    let runs = pairs
        .iter()
        .flat_map(|pair| pair.src.0.iter().chain(&pair.dst.0));
    let numbers = runs.flat_map(|run| {
        let count = (run.count > 1).then_some(run.count);
        [Some(run.start), count].into_iter().flatten()
    });
    numbers.collect()
}

/// The floor: writes each number as MessagePack, one after another, and reads them back.
fn write_and_read(numbers: &[u32]) -> Result<(), CommandError> {
    let mut bytes = Vec::new();
    for number in numbers {
        rmp::encode::write_uint(&mut bytes, u64::from(*number)).map_err(CommandError::failed)?;
    }
    let mut rest = &bytes[..];
    let mut read: Vec<u32> = Vec::new();
    while !rest.is_empty() {
        read.push(rmp::decode::read_int(&mut rest).map_err(CommandError::failed)?);
    }
    if black_box(read.len()) == numbers.len() {
        Ok(())
    } else {
        Err(CommandError::Failed("numbers are missing".to_owned()))
    }
}
