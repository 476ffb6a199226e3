//! Finds tensors that claim the same bytes.

use super::RegistrationError;
use crate::types::{Registration, TensorView};

/// Refuses two tensors of which any two pages share a byte. Every tensor was checked by itself before, so that no end
/// overflows.
pub(super) fn check(registration: &Registration) -> Result<(), RegistrationError> {
    let pages = u64::from(registration.device_pages);
    let tensors = &registration.tensors;
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|index| (tensors[*index].allocation, tensors[*index].offset_bytes));
    for (place, first) in order.iter().enumerate() {
        let low = &tensors[*first];
        let end = low.offset_bytes + (pages - 1) * low.page_stride_bytes + low.page_bytes;
        let inside = order[place + 1..].iter().take_while(|index| {
            let high = &tensors[**index];
            high.allocation == low.allocation && high.offset_bytes < end
        });
        for second in inside {
            check_pair(tensors, *first, *second, pages)?;
        }
    }
    Ok(())
}

/// Two tensors of one allocation, the second one starting inside the first one's span.
fn check_pair(
    tensors: &[TensorView],
    first: usize,
    second: usize,
    pages: u64,
) -> Result<(), RegistrationError> {
    let (low, high) = (&tensors[first], &tensors[second]);
    let stride = low.page_stride_bytes;
    let distance = high.offset_bytes - low.offset_bytes;
    // Page 0 of `high` starts this far into stride number `skipped` of `low`, and so does every later page with its own.
    let (skipped, into) = (distance / stride, distance % stride);
    let hits_same = into < low.page_bytes;
    let hits_next = skipped + 1 < pages && into + high.page_bytes > stride;
    if pages > 1 && high.page_stride_bytes != stride {
        return Err(RegistrationError::new(
            format!("tensors[{second}].page_stride_bytes"),
            high.page_stride_bytes,
            format!(
                "its pages lie between those of tensors[{first}] (page_stride_bytes {stride}): \
                 interleaved tensors must have the same stride"
            ),
        ));
    }
    if hits_same || hits_next {
        return Err(RegistrationError::new(
            format!("tensors[{second}].offset_bytes"),
            high.offset_bytes,
            format!("its pages overlap those of tensors[{first}]"),
        ));
    }
    Ok(())
}
