//! The workload of a replay: the requests and the sizes, checked against each other.

use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};

use crate::error::CommandError;
use kvferry_core::ARENA_PAGES_MAX;
use kvferry_engine::settings::EngineLayout;
use kvferry_memory::Depot;
use kvferry_types::{GroupGeometry, GroupId, MemoryGeometry, Ratio, Sharding, SlotId};
use kvferry_workload::hashes::PageHasher;
use kvferry_workload::models::{ModelGroup, units};
use kvferry_workload::scheduler::{ComputeSteps, Prompt, Scheduler};
use kvferry_workload::trace::{self, Shape, Trace, TraceRequest};

use super::{ArenaPages, Arguments, DEFAULT_G2, DEFAULT_RATIO, Mode};

/// Most tokens that an engine with several groups computes in one step, as is common for engines. A multiple of the
/// pages of all models.
const STEP_TOKENS: u32 = 2048;
/// Tokens of a hash id in published traces.
const TRACE_BLOCK_TOKENS: u32 = 512;

/// Requests and sizes of a replay.
pub(super) struct Workload {
    pub(super) trace: Trace,
    pub(super) hasher: PageHasher,
    pub(super) ratio: Ratio,
    /// The groups of layers of the model.
    pub(super) groups: Vec<ModelGroup>,
    /// The ranks that hold the same KV.
    pub(super) sharding: Sharding,
    /// Tokens of the unit of the hashes: of an engine page, for a model with one group.
    pub(super) unit_tokens: u32,
    /// Pages of the engine's memory: `--g1-pages`, or the longest prompt if that is more; with several groups, and the
    /// null page.
    pub(super) device_pages: u32,
    /// Pages of G2 on each rank; 0 for none.
    pub(super) arena_pages: u32,
    /// Pages of G3 on each rank; 0 for none.
    pub(super) disk_pages: u32,
    /// Host memory of all ranks together, in bytes.
    pub(super) g2_bytes: u64,
}

impl Workload {
    pub(super) fn load(arguments: &Arguments) -> Result<Self, CommandError> {
        let config = |error: &dyn std::fmt::Display| CommandError::Config(error.to_string());
        let ratio =
            Ratio::new(arguments.ratio.unwrap_or(DEFAULT_RATIO)).map_err(|error| config(&error))?;
        let unit_tokens = arguments.unit_tokens();
        ratio
            .offload_page_tokens(unit_tokens)
            .map_err(|error| config(&error))?;
        let groups = arguments.model.groups(unit_tokens, arguments.ranks);
        let groups = groups.map_err(|error| config(&error))?;
        let built_in = Shape {
            block_tokens: unit_tokens,
            ..Shape::default()
        };
        let block_tokens = arguments
            .trace_block_tokens
            .unwrap_or(match arguments.trace {
                Some(_) => TRACE_BLOCK_TOKENS,
                None => built_in.block_tokens,
            });
        let hasher = PageHasher::new(block_tokens, unit_tokens).map_err(|error| config(&error))?;
        let mut trace = match &arguments.trace {
            Some(path) => trace::read(path, block_tokens, arguments.requests)
                .map_err(|error| CommandError::Data(error.to_string()))?,
            None => {
                let shape = Shape {
                    block_tokens,
                    ..built_in
                };
                let mut trace = trace::generate(&shape, arguments.seed);
                trace
                    .requests
                    .truncate(arguments.requests.unwrap_or(usize::MAX));
                trace
            }
        };
        let found = trace.requests.len();
        if let Some(asked) = arguments.requests.filter(|asked| *asked > found) {
            let of = match &arguments.trace {
                Some(path) => path.display().to_string(),
                None => "the built-in workload".to_owned(),
            };
            tracing::warn!(
                "--requests is {asked}, and {of} has {found} requests: all of them are replayed"
            );
        }
        if let Some(most) = arguments.max_prompt_tokens {
            let cut = |request: &mut TraceRequest| cut(request, most, block_tokens);
            trace.requests.iter_mut().for_each(cut);
        }
        let needs = trace.requests.iter().map(|request| match &groups[..] {
            [_] => full_pages(&hasher, request, unit_tokens),
            groups => pages_for(groups, request),
        });
        let longest = u32::try_from(needs.max().unwrap_or(0)).map_err(|error| config(&error))?;
        let null_pages = u32::from(groups.len() > 1);
        let device_pages = arguments
            .g1_pages
            .max(longest)
            .max(1)
            .saturating_add(null_pages);
        let sharding = arguments.model.sharding(arguments.ranks);
        let sharding = sharding.map_err(|error| config(&error))?;
        let shards = u64::from(sharding.shards());
        let page_bytes = largest_page_bytes(&groups);
        let (arena_pages, g2_bytes) = match (arguments.g2_pages, arguments.mode) {
            // An `up` that runs already has its own.
            _ if arguments.socket_dir.is_some() => (0, 0),
            (Some(ArenaPages::Unlimited), Mode::Offline) => (ARENA_PAGES_MAX, 0),
            (Some(ArenaPages::Unlimited), Mode::Live) => {
                return Err(CommandError::Config(
                    "--g2-pages unlimited needs --mode offline: live memory is limited".to_owned(),
                ));
            }
            (Some(ArenaPages::Count(pages)), _) => {
                (pages, shards * Depot::bytes_for(pages, page_bytes))
            }
            (None, _) => {
                let bytes = arguments.g2.unwrap_or(DEFAULT_G2).0;
                (Depot::pages_in(bytes / shards, page_bytes), bytes)
            }
        };
        let none = arguments.socket_dir.is_some()
            || arguments.g2_pages == Some(ArenaPages::Count(0))
            || arguments.g2.is_some_and(|size| size.0 == 0);
        if arena_pages < ratio.pages() && !none {
            let least = shards * Depot::bytes_for(ratio.pages(), page_bytes);
            return Err(CommandError::Config(format!(
                "G2 has room for {arena_pages} pages on each rank, one block takes {ratio}: use \
                 --g2-pages {ratio} or --g2 {least} at least, a lower --ratio, or --g2-pages 0 for none"
            )));
        }
        let disk_pages = match arguments.g3_pages {
            None => 0,
            Some(ArenaPages::Count(pages)) => pages,
            Some(ArenaPages::Unlimited) => ARENA_PAGES_MAX,
        };
        check_disk(disk_pages, arena_pages, ratio)?;
        if let Some(g3) = arguments
            .g3
            .filter(|_| arguments.uses_disk() && arena_pages == 0)
        {
            return Err(CommandError::Config(format!(
                "--g3 is {g3} and G2 has no page: pages reach the disk from host memory, use --g2-pages {ratio} at least, \
                 or --g3 0"
            )));
        }
        Ok(Self {
            trace,
            hasher,
            ratio,
            groups,
            sharding,
            unit_tokens,
            device_pages,
            arena_pages,
            disk_pages,
            g2_bytes,
        })
    }

    /// The prompts, numbered in the order of their arrival.
    pub(super) fn prompts(&self) -> impl Iterator<Item = (&TraceRequest, Prompt)> {
        self.trace
            .requests
            .iter()
            .enumerate()
            .map(|(index, request)| {
                let mut hashes = self.hasher.hash(&request.blocks);
                hashes.truncate(full_pages(&self.hasher, request, self.unit_tokens));
                let prompt = Prompt {
                    slot: SlotId(index as u64),
                    namespace: Arc::from([]),
                    tokens: request.input_tokens,
                    hashes: Arc::new(hashes),
                };
                (request, prompt)
            })
    }

    /// The scheduler of an engine.
    pub(super) fn scheduler(&self, arguments: &Arguments) -> Scheduler {
        match &self.groups[..] {
            [_] => Scheduler::new(self.device_pages, arguments.g1_pages),
            groups => Scheduler::of_groups(
                groups.iter().map(|group| group.layers).collect(),
                self.device_pages - 1,
                arguments.g1_pages,
                ComputeSteps {
                    tokens: STEP_TOKENS,
                    await_stores: arguments.sequential,
                },
            ),
        }
    }

    /// The memory that a simulated rank registers.
    pub(super) fn geometry(&self) -> MemoryGeometry {
        let (hash_tokens, hit_tokens) = units(&self.groups);
        let groups = (0..).map(GroupId).zip(&self.groups);
        let groups = groups.map(|(group, ModelGroup { layers, geometry })| {
            let (attention, window_tokens) = layers.kind.attention();
            GroupGeometry {
                group,
                attention,
                window_tokens,
                eagle: layers.drafted,
                engine_page_tokens: layers.page_tokens,
                layers: geometry.layers,
                page_bytes: geometry.page_bytes(),
                device_pages: self.device_pages,
                content_digest: [0; 16],
                layout_fingerprint: [0; 16],
            }
        });
        MemoryGeometry {
            hash_tokens,
            hit_tokens,
            groups: groups.collect(),
        }
    }

    /// Bytes of the largest page of a group on one rank, which is the size of the pages of host memory.
    pub(super) fn page_bytes(&self) -> u64 {
        largest_page_bytes(&self.groups)
    }

    /// Bytes of each page of device memory on one rank.
    pub(super) fn device_page_bytes(&self, layout: EngineLayout) -> u64 {
        match layout {
            EngineLayout::Contiguous => self.page_bytes(),
            EngineLayout::LayerSeparate => {
                let groups = self.groups.iter();
                groups.map(|group| group.geometry.page_bytes()).sum()
            }
        }
    }

    /// A progress bar over the requests; hidden with `--quiet` and without a terminal.
    pub(super) fn progress(&self, arguments: &Arguments) -> ProgressBar {
        if arguments.quiet {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(self.trace.requests.len() as u64);
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {elapsed} {msg}");
        match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}

/// Refuses a disk that cannot be used, and warns of one that is of little use.
fn check_disk(disk_pages: u32, arena_pages: u32, ratio: Ratio) -> Result<(), CommandError> {
    if disk_pages == 0 {
        return Ok(());
    }
    if arena_pages == 0 {
        return Err(CommandError::Config(format!(
            "--g3-pages is {disk_pages} and G2 has no page: pages reach the disk from host memory, use --g2-pages {ratio} \
             at least, or --g3-pages 0"
        )));
    }
    if disk_pages < ratio.pages() {
        return Err(CommandError::Config(format!(
            "G3 has room for {disk_pages} pages on each rank, one block takes {ratio}: use --g3-pages {ratio} at least, \
             a lower --ratio, or --g3-pages 0 for none"
        )));
    }
    if disk_pages < arena_pages {
        tracing::warn!(
            g3_pages = disk_pages,
            g2_pages = arena_pages,
            "G3 is smaller than G2, which has nearly all of its pages: use more --g3-pages"
        );
    }
    Ok(())
}

/// Cuts a prompt to its first `tokens`, and to the blocks that contain them. The length of the answer does not change.
fn cut(request: &mut TraceRequest, tokens: u64, block_tokens: u32) {
    if request.input_tokens > tokens {
        request.input_tokens = tokens;
        let blocks = tokens.div_ceil(u64::from(block_tokens.max(1)));
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        request.blocks.truncate(blocks);
    }
}

/// Number of full pages of a prompt whose hashes are known.
fn full_pages(hasher: &PageHasher, request: &TraceRequest, page_tokens: u32) -> usize {
    let full = request.input_tokens / u64::from(page_tokens);
    let full = usize::try_from(full).unwrap_or(usize::MAX);
    hasher.pages(request.blocks.len()).min(full)
}

/// Pages of all groups for all tokens of a prompt.
fn pages_for(groups: &[ModelGroup], request: &TraceRequest) -> usize {
    let pages = groups.iter().map(|group| {
        let pages = request
            .input_tokens
            .div_ceil(group.layers.page_tokens.into());
        usize::try_from(pages).unwrap_or(usize::MAX)
    });
    pages.fold(0, usize::saturating_add)
}

fn largest_page_bytes(groups: &[ModelGroup]) -> u64 {
    let bytes = groups.iter().map(|group| group.geometry.page_bytes());
    bytes.max().unwrap_or(0)
}
