//! Finds tensors that use the same bytes.

use super::RegistrationError;
use crate::layout::Pieces;
use kvferry_types::{GroupMemory, TensorView};

/// One contiguous piece of every page of a tensor.
struct Claim {
    tensor: usize,
    allocation: u32,
    /// Start of the piece of page 0 in the allocation.
    start_bytes: u64,
    piece_bytes: u64,
}

/// Refuses two tensors of a group whose pages share a byte. Tensors of different groups may: a page of the memory belongs
/// to one group at a time. Every tensor was checked by itself before, so that no end overflows,
/// and the pieces were counted.
pub(super) fn check(group: &GroupMemory) -> Result<(), RegistrationError> {
    let pages = u64::from(group.device_pages);
    let tensors = &group.tensors;
    let mut claims: Vec<Claim> = (0..tensors.len())
        .flat_map(|tensor| claims_of(tensors, tensor))
        .collect();
    claims.sort_by_key(|claim| (claim.allocation, claim.start_bytes));
    for (place, low) in claims.iter().enumerate() {
        let reach = (pages - 1) * tensors[low.tensor].page_stride_bytes + low.piece_bytes;
        let inside = claims[place + 1..].iter().take_while(|high| {
            high.allocation == low.allocation && high.start_bytes < low.start_bytes + reach
        });
        // The pieces of one tensor do not overlap, because its axes nest.
        for high in inside.filter(|high| high.tensor != low.tensor) {
            check_pair(tensors, low, high, pages)?;
        }
    }
    Ok(())
}

fn claims_of(tensors: &[TensorView], tensor: usize) -> impl Iterator<Item = Claim> {
    let view = &tensors[tensor];
    let pieces = Pieces::of(view);
    let piece_bytes = pieces.piece_bytes;
    pieces.offsets().into_iter().map(move |offset| Claim {
        tensor,
        allocation: view.allocation,
        start_bytes: view.offset_bytes + offset,
        piece_bytes,
    })
}

/// Checks two claims on one allocation, the second one starting inside the first one's span.
fn check_pair(
    tensors: &[TensorView],
    low: &Claim,
    high: &Claim,
    pages: u64,
) -> Result<(), RegistrationError> {
    let (first, second) = (low.tensor, high.tensor);
    let stride = tensors[first].page_stride_bytes;
    let high_stride = tensors[second].page_stride_bytes;
    if pages > 1 && high_stride != stride {
        return Err(RegistrationError::new(
            format!("tensors[{second}].page_stride_bytes"),
            high_stride,
            format!(
                "its pages lie between those of tensors[{first}] (page_stride_bytes {stride}): \
                 interleaved tensors must have the same stride"
            ),
        ));
    }
    // Page 0 of `high` starts at this offset in a stride of `low`, and every later page of `high` at the same offset in
    // a later stride. With a single page, the span of `low` is that page, so that `high` starts inside it.
    let distance = high.start_bytes - low.start_bytes;
    let hit = pages == 1 || {
        let (skipped, into) = (distance / stride, distance % stride);
        into < low.piece_bytes || (skipped + 1 < pages && into + high.piece_bytes > stride)
    };
    if hit {
        return Err(RegistrationError::new(
            format!("tensors[{second}].offset_bytes"),
            tensors[second].offset_bytes,
            format!("its pages overlap those of tensors[{first}]"),
        ));
    }
    Ok(())
}
