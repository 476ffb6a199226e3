//! Validates an engine's description of its memory.

mod overlap;
mod proofs;
mod tensor;
#[cfg(test)]
pub(super) mod tests;

use std::collections::HashMap;

pub use proofs::{ProofError, pieces_without_proof, verify_proofs};

use super::layout::{MemoryLayout, Pieces};
use kvferry_plan::{PlanSide, Side};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, CONTENT_BYTES_MAX, ChunkHandle,
    GroupMemory, Registration, TensorRole, Timeline,
};

/// Most allocations of one registration.
pub const ALLOCATIONS_MAX: usize = 256;
/// Most chunks of one registration, all allocations together: 320 GiB in PyTorch's chunks of 20 MiB.
pub const CHUNKS_MAX: usize = 16_384;
/// Most groups of one registration.
pub const GROUPS_MAX: usize = 255;
/// Most tensors of one group.
pub const TENSORS_MAX: usize = 4096;
/// Most contiguous pieces of one page, all tensors together.
pub const FRAGMENTS_MAX: usize = 8192;
/// Most axes of one tensor.
pub const AXES_MAX: usize = 8;
/// Largest page, all layers and roles together, in bytes.
pub const PAGE_BYTES_MAX: u64 = 1 << 30;
/// Shortest nonce, in bytes.
pub const NONCE_BYTES_MIN: usize = 16;
/// Bytes of the word of a timeline.
pub const TIMELINE_BYTES: u64 = 8;
/// Longest nonce, in bytes.
pub const NONCE_BYTES_MAX: usize = 64;

/// A field that contradicts itself or another field, or exceeds a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {remedy}")]
pub struct RegistrationError {
    /// Path of the field, such as `tensors[3].page_stride_bytes`.
    pub field: String,
    /// The value as given.
    pub value: String,
    /// How to correct the value.
    pub remedy: String,
}

impl RegistrationError {
    fn new(field: impl Into<String>, value: impl ToString, remedy: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            value: value.to_string(),
            remedy: remedy.into(),
        }
    }

    /// The error of a field of a group.
    fn within(self, group: usize) -> Self {
        Self {
            field: format!("groups[{group}].{}", self.field),
            ..self
        }
    }
}

/// Derives the location of every page, or names the first field that contradicts the rest.
///
/// Pure arithmetic on the description: no memory is accessed. The work is bounded by [`FRAGMENTS_MAX`] squared, for all
/// groups together.
pub fn validate(registration: &Registration) -> Result<MemoryLayout, RegistrationError> {
    check_limits(registration)?;
    check_content(registration)?;
    check_ranks(registration)?;
    check_allocations(registration)?;
    let mut pieces = 0;
    for (index, group) in registration.groups.iter().enumerate() {
        let within = |error: RegistrationError| error.within(index);
        check_group(group).map_err(within)?;
        for tensor in 0..group.tensors.len() {
            tensor::check(registration, group, tensor).map_err(within)?;
        }
        check_roles(group).map_err(within)?;
        check_page_total(group).map_err(within)?;
        check_pieces(group, &mut pieces).map_err(within)?;
        overlap::check(group).map_err(within)?;
    }
    proofs::check_one(registration, "nonce", &registration.nonce)?;
    proofs::check(registration)?;
    check_timeline(registration)?;
    check_slices(registration)?;
    Ok(MemoryLayout::derive(registration))
}

/// Checks what the tensors say of the rank's slices, from which plans are made later.
fn check_slices(registration: &Registration) -> Result<(), RegistrationError> {
    Side::of(PlanSide::Alone, registration)
        .map_err(|error| RegistrationError::new("slices", "contradictory", error.to_string()))?;
    Ok(())
}

fn check_limits(registration: &Registration) -> Result<(), RegistrationError> {
    let lists = [
        (
            "allocations",
            registration.allocations.len(),
            ALLOCATIONS_MAX,
        ),
        ("groups", registration.groups.len(), GROUPS_MAX),
    ];
    for (field, length, max) in lists {
        if length == 0 || length > max {
            let value = format!("a list of {length}");
            return Err(RegistrationError::new(
                field,
                value,
                format!("give 1 to {max}"),
            ));
        }
    }
    Ok(())
}

/// Requires a content name, because pages of two models, or of one model with another dtype, may have the same layout:
/// only the engine can distinguish them.
fn check_content(registration: &Registration) -> Result<(), RegistrationError> {
    let length = registration.content.len();
    if (1..=CONTENT_BYTES_MAX).contains(&length) {
        return Ok(());
    }
    let (value, remedy) = match length {
        0 => (
            "absent or empty".to_owned(),
            format!(
                "name model, revision, dtype and quantisation of the KV, in 1 to {CONTENT_BYTES_MAX} bytes; \
                 engines that name the same share pages"
            ),
        ),
        _ => (
            format!("{length} bytes long"),
            format!("give 1 to {CONTENT_BYTES_MAX} bytes: a digest of what is longer"),
        ),
    };
    Err(RegistrationError::new("content", value, remedy))
}

fn check_ranks(registration: &Registration) -> Result<(), RegistrationError> {
    if registration.tp_size == 0 {
        let remedy = "give the number of ranks of the engine, at least 1";
        return Err(RegistrationError::new("tp_size", 0, remedy));
    }
    let slices = [("rank", registration.rank.0), ("shard", registration.shard)];
    for (field, value) in slices {
        if value >= registration.tp_size {
            let remedy = format!("it must be below tp_size ({})", registration.tp_size);
            return Err(RegistrationError::new(field, value, remedy));
        }
    }
    Ok(())
}

/// Checks the numbers of a group, and that it has window tokens exactly when its attention needs them.
fn check_group(group: &GroupMemory) -> Result<(), RegistrationError> {
    let tensors = group.tensors.len();
    if tensors == 0 || tensors > TENSORS_MAX {
        let value = format!("a list of {tensors}");
        let remedy = format!("give 1 to {TENSORS_MAX}");
        return Err(RegistrationError::new("tensors", value, remedy));
    }
    let counts = [
        (
            "engine_page_tokens",
            group.engine_page_tokens,
            "tokens of one page",
        ),
        (
            "device_pages",
            group.device_pages,
            "pages of the engine's memory",
        ),
        ("layers", group.layers, "layers of the group"),
    ];
    for (field, value, meaning) in counts {
        if value == 0 {
            let remedy = format!("give the number of {meaning}, at least 1");
            return Err(RegistrationError::new(field, value, remedy));
        }
    }
    let tokens = group.window_tokens;
    let remedy = match group.attention {
        Attention::SlidingWindow | Attention::ChunkedLocal if tokens == 0 => {
            "give the tokens of the window or chunk, at least 1"
        }
        Attention::Full | Attention::State if tokens > 0 => {
            "only a sliding window or a chunk has tokens: leave it out"
        }
        _ => return Ok(()),
    };
    Err(RegistrationError::new("window_tokens", tokens, remedy))
}

/// The value of a field that holds a word of a later version.
const UNKNOWN: &str = "a word that this version does not know";

/// Refuses words of later versions in the description of an allocation: memory can only be opened in a known way.
fn check_words(index: usize, allocation: &Allocation) -> Result<(), RegistrationError> {
    let chunks = match &allocation.handle {
        AllocationHandle::Chunks(chunks) => &chunks[..],
        _ => &[],
    };
    let chunk = chunks
        .iter()
        .position(|chunk| chunk.handle == ChunkHandle::Other);
    let (field, words) = match (allocation.kind, &allocation.handle, chunk) {
        (AllocationKind::Other, ..) => ("kind".to_owned(), "shared_memory or device"),
        (_, AllocationHandle::Other, _) => (
            "handle".to_owned(),
            "path, ticket, cuda_ipc, cuda_fabric or chunks",
        ),
        (.., Some(chunk)) => (
            format!("handle.chunks[{chunk}].handle"),
            "ticket or cuda_fabric",
        ),
        _ => return Ok(()),
    };
    Err(RegistrationError::new(
        format!("allocations[{index}].{field}"),
        UNKNOWN,
        format!("name {words}, or update kvferry"),
    ))
}

fn kind_of_handle(handle: &AllocationHandle) -> &'static str {
    match handle {
        AllocationHandle::Path(_) => "a path",
        AllocationHandle::Ticket(_) => "a ticket",
        AllocationHandle::CudaIpc(_) => "a CUDA IPC handle",
        AllocationHandle::CudaFabric(_) => "a CUDA fabric handle",
        AllocationHandle::Chunks(_) => "a list of chunks",
        AllocationHandle::Other => UNKNOWN,
    }
}

/// Checks that a handle matches the kind of its allocation, and that device memory has a device UUID.
fn check_handle(
    registration: &Registration,
    index: usize,
    allocation: &Allocation,
) -> Result<(), RegistrationError> {
    use AllocationHandle::{Chunks, CudaFabric, CudaIpc, Path};
    let remedy = match (allocation.kind, &allocation.handle) {
        (AllocationKind::SharedMemory, CudaIpc(_) | CudaFabric(_) | Chunks(_)) => {
            "shared_memory has a path or a ticket"
        }
        (AllocationKind::Device, Path(_)) => {
            "device memory has cuda_ipc, cuda_fabric, a ticket of its file descriptor, or chunks"
        }
        (AllocationKind::Device, _) if registration.device_uuid.is_none() => {
            let remedy = format!("allocations[{index}] lies on a device: name it");
            return Err(RegistrationError::new("device_uuid", "absent", remedy));
        }
        _ => return Ok(()),
    };
    let field = format!("allocations[{index}].handle");
    let value = kind_of_handle(&allocation.handle);
    Err(RegistrationError::new(field, value, remedy))
}

fn check_allocations(registration: &Registration) -> Result<(), RegistrationError> {
    let allocations = &registration.allocations;
    for (index, allocation) in allocations.iter().enumerate() {
        check_words(index, allocation)?;
    }
    check_chunks(allocations)?;
    for (index, allocation) in allocations.iter().enumerate() {
        check_handle(registration, index, allocation)?;
        if allocation.bytes == 0 {
            let remedy = "give the size of the memory in bytes";
            return Err(RegistrationError::new(
                format!("allocations[{index}].bytes"),
                0,
                remedy,
            ));
        }
        let same = allocations[..index]
            .iter()
            .position(|earlier| earlier.handle == allocation.handle);
        if let Some(earlier) = same {
            let value = match &allocation.handle {
                AllocationHandle::Path(path) => format!("'{path}'"),
                other => kind_of_handle(other).to_owned(),
            };
            return Err(RegistrationError::new(
                format!("allocations[{index}].handle"),
                value,
                format!("allocations[{earlier}] has the same handle: list each memory once"),
            ));
        }
    }
    Ok(())
}

/// Checks that the chunks of an allocation add up to its size, and that none is listed twice.
fn check_chunks(allocations: &[Allocation]) -> Result<(), RegistrationError> {
    let mut seen: HashMap<ChunkHandle, (usize, usize)> = HashMap::new();
    for (index, allocation) in allocations.iter().enumerate() {
        let AllocationHandle::Chunks(chunks) = &allocation.handle else {
            continue;
        };
        let field = format!("allocations[{index}].handle.chunks");
        if chunks.is_empty() || seen.len() + chunks.len() > CHUNKS_MAX {
            let value = format!("a list of {}", chunks.len());
            let remedy = format!("give 1 to {CHUNKS_MAX}, in all allocations together");
            return Err(RegistrationError::new(field, value, remedy));
        }
        let mut bytes: u64 = 0;
        for (place, chunk) in chunks.iter().enumerate() {
            if chunk.bytes == 0 {
                let remedy = "give the size of the chunk in bytes";
                let field = format!("{field}[{place}].bytes");
                return Err(RegistrationError::new(field, 0, remedy));
            }
            bytes = bytes.saturating_add(chunk.bytes);
            let before = seen.insert(chunk.handle.clone(), (index, place));
            if let Some((earlier, its)) = before {
                let value = "one that was there before";
                let remedy = format!(
                    "allocations[{earlier}].handle.chunks[{its}] has the same: list each memory once"
                );
                let field = format!("{field}[{place}].handle");
                return Err(RegistrationError::new(field, value, remedy));
            }
        }
        if bytes != allocation.bytes {
            let remedy = format!("its chunks have {bytes} bytes together: give as many");
            let field = format!("allocations[{index}].bytes");
            return Err(RegistrationError::new(field, allocation.bytes, remedy));
        }
    }
    Ok(())
}

/// Checks that every layer has tensors and each role at most once, and that `Kv` does not occur beside `K` or `V`.
fn check_roles(group: &GroupMemory) -> Result<(), RegistrationError> {
    let unknown = |tensor: &kvferry_types::TensorView| tensor.role == TensorRole::Other;
    if let Some(index) = group.tensors.iter().position(unknown) {
        return Err(RegistrationError::new(
            format!("tensors[{index}].role"),
            UNKNOWN,
            "name k, v, kv, latent or state, or update kvferry",
        ));
    }
    let mut seen = HashMap::new();
    for (index, tensor) in group.tensors.iter().enumerate() {
        if let Some(earlier) = seen.insert((tensor.layer, tensor.role), index) {
            return Err(RegistrationError::new(
                format!("tensors[{index}].role"),
                format!("{:?} of layer {}", tensor.role, tensor.layer),
                format!("tensors[{earlier}] is the same: give each (layer, role) once"),
            ));
        }
    }
    for (index, tensor) in group.tensors.iter().enumerate() {
        let split = [TensorRole::K, TensorRole::V]
            .into_iter()
            .find_map(|role| seen.get(&(tensor.layer, role)));
        if let (TensorRole::Kv, Some(other)) = (tensor.role, split) {
            return Err(RegistrationError::new(
                format!("tensors[{index}].role"),
                format!("Kv of layer {}", tensor.layer),
                format!(
                    "tensors[{other}] describes K or V of the same layer: describe both together \
                     or each apart"
                ),
            ));
        }
    }
    let mut layers: Vec<u32> = group.tensors.iter().map(|tensor| tensor.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    // Every layer is below `layers`, so the first gap in the sorted list is the first layer without a tensor.
    if (layers.len() as u64) < u64::from(group.layers) {
        let missing = layers
            .iter()
            .zip(0..)
            .take_while(|(layer, place)| *layer == place)
            .count();
        return Err(RegistrationError::new(
            "layers",
            group.layers,
            format!("layer {missing} has no tensor: describe it, or lower the number"),
        ));
    }
    Ok(())
}

fn check_page_total(group: &GroupMemory) -> Result<(), RegistrationError> {
    // Each term is at most PAGE_BYTES_MAX and there are at most TENSORS_MAX of them: the sum cannot overflow.
    let total: u64 = group.tensors.iter().map(|tensor| tensor.page_bytes).sum();
    if total > PAGE_BYTES_MAX {
        return Err(RegistrationError::new(
            "tensors",
            format!("{total} bytes a page in all"),
            format!("a page has at most {PAGE_BYTES_MAX} bytes: lower engine_page_tokens"),
        ));
    }
    Ok(())
}

/// Limits the number of pieces that the overlap check and every copy process. `total` counts those of all groups.
fn check_pieces(group: &GroupMemory, total: &mut u64) -> Result<(), RegistrationError> {
    for (index, tensor) in group.tensors.iter().enumerate() {
        let count = Pieces::of(tensor).count;
        // Each term is at most `PAGE_BYTES_MAX` and the sum before was at most `FRAGMENTS_MAX`: the sum cannot
        // overflow.
        *total += count;
        if *total > FRAGMENTS_MAX as u64 {
            return Err(RegistrationError::new(
                format!("tensors[{index}].strides"),
                format!("{:?}, {count} pieces a page", tensor.strides),
                format!(
                    "pages have at most {FRAGMENTS_MAX} contiguous pieces in all tensors together: \
                     describe larger contiguous ranges"
                ),
            ));
        }
    }
    Ok(())
}

/// Size in bytes of the allocation that `field` refers to.
fn allocation_of(
    registration: &Registration,
    field: impl Into<String>,
    index: u32,
) -> Result<u64, RegistrationError> {
    usize::try_from(index)
        .ok()
        .and_then(|index| registration.allocations.get(index))
        .map(|allocation| allocation.bytes)
        .ok_or_else(|| {
            let count = registration.allocations.len();
            RegistrationError::new(
                field,
                index,
                format!("there are {count} allocations, from 0"),
            )
        })
}

/// Checks that the timeline's word is aligned and lies within an allocation of device memory.
fn check_timeline(registration: &Registration) -> Result<(), RegistrationError> {
    let Some(Timeline {
        allocation,
        offset_bytes,
    }) = registration.timeline
    else {
        return Ok(());
    };
    let found = usize::try_from(allocation)
        .ok()
        .and_then(|index| registration.allocations.get(index));
    let Some(found) = found.filter(|found| found.kind == AllocationKind::Device) else {
        let remedy = "give the index of an allocation of device memory";
        let field = "timeline.allocation";
        return Err(RegistrationError::new(field, allocation, remedy));
    };
    let end = offset_bytes.checked_add(TIMELINE_BYTES);
    if !offset_bytes.is_multiple_of(TIMELINE_BYTES) || end.is_none_or(|end| end > found.bytes) {
        let remedy = format!(
            "it must be a multiple of {TIMELINE_BYTES}, and the word must end within \
             allocations[{allocation}] ({} bytes)",
            found.bytes
        );
        let field = "timeline.offset_bytes";
        return Err(RegistrationError::new(field, offset_bytes, remedy));
    }
    Ok(())
}
