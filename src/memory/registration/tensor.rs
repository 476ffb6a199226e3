//! Checks one tensor: its shape, strides and sizes in bytes must be consistent.

use super::{AXES_MAX, PAGE_BYTES_MAX, RegistrationError, allocation_of};
use kvferry_types::{GroupMemory, Registration, TensorView};

/// A tensor and its index in its group.
struct Checked<'a> {
    tensor: &'a TensorView,
    index: usize,
}

impl Checked<'_> {
    fn refuse(
        &self,
        field: &str,
        value: impl ToString,
        remedy: impl Into<String>,
    ) -> RegistrationError {
        RegistrationError::new(format!("tensors[{}].{field}", self.index), value, remedy)
    }
}

/// Checks the tensor at `index` by itself and against its allocation.
pub(super) fn check(
    registration: &Registration,
    group: &GroupMemory,
    index: usize,
) -> Result<(), RegistrationError> {
    let tensor = &group.tensors[index];
    let checked = Checked { tensor, index };
    if tensor.layer >= group.layers {
        let remedy = format!("layers count from 0 and there are {}", group.layers);
        return Err(checked.refuse("layer", tensor.layer, remedy));
    }
    let page_axis = check_axes(&checked)?;
    check_shape(&checked, page_axis, group.device_pages)?;
    check_strides(&checked, page_axis)?;
    check_end(&checked, registration)
}

/// Checks that shape and strides have the same length, 1 to `AXES_MAX`; returns the page axis as an index into them.
fn check_axes(checked: &Checked<'_>) -> Result<usize, RegistrationError> {
    let tensor = checked.tensor;
    let axes = tensor.shape.len();
    if axes == 0 || axes > AXES_MAX {
        let value = format!("a list of {axes}");
        return Err(checked.refuse("shape", value, format!("give 1 to {AXES_MAX} axes")));
    }
    if tensor.strides.len() != axes {
        let value = format!("a list of {}", tensor.strides.len());
        let remedy = format!("give one stride for each of the {axes} axes of shape");
        return Err(checked.refuse("strides", value, remedy));
    }
    let page_axis = usize::try_from(tensor.page_axis)
        .ok()
        .filter(|axis| *axis < axes);
    page_axis.ok_or_else(|| {
        let remedy = format!("shape has {axes} axes, from 0: name the one that counts pages");
        checked.refuse("page_axis", tensor.page_axis, remedy)
    })
}

/// Checks that the page count and the page size follow from the shape.
fn check_shape(
    checked: &Checked<'_>,
    page_axis: usize,
    device_pages: u32,
) -> Result<(), RegistrationError> {
    let tensor = checked.tensor;
    if let Some(axis) = tensor.shape.iter().position(|length| *length == 0) {
        return Err(checked.refuse(
            &format!("shape[{axis}]"),
            0,
            "an axis has at least 1 element",
        ));
    }
    if tensor.shape[page_axis] != u64::from(device_pages) {
        let remedy = format!("the page axis must count device_pages ({device_pages})");
        let field = format!("shape[{page_axis}]");
        return Err(checked.refuse(&field, tensor.shape[page_axis], remedy));
    }
    if tensor.element_bytes == 0 {
        return Err(checked.refuse("element_bytes", 0, "give the bytes of one element"));
    }
    let inner = tensor
        .shape
        .iter()
        .enumerate()
        .filter(|(axis, _)| *axis != page_axis);
    let page_bytes = inner
        .map(|(_, length)| *length)
        .try_fold(u64::from(tensor.element_bytes), u64::checked_mul)
        .filter(|bytes| *bytes <= PAGE_BYTES_MAX);
    let Some(page_bytes) = page_bytes else {
        let value = format!("{:?}", tensor.shape);
        let remedy = format!("a page has at most {PAGE_BYTES_MAX} bytes: lower engine_page_tokens");
        return Err(checked.refuse("shape", value, remedy));
    };
    if tensor.page_bytes != page_bytes {
        let remedy = format!("shape and element_bytes make a page of {page_bytes} bytes");
        return Err(checked.refuse("page_bytes", tensor.page_bytes, remedy));
    }
    Ok(())
}

/// Checks that the axes nest: the stride of each axis is at least the reach of all axes inside it, so that no byte
/// belongs to two elements.
fn check_strides(checked: &Checked<'_>, page_axis: usize) -> Result<(), RegistrationError> {
    let tensor = checked.tensor;
    let stride_bytes = tensor.strides[page_axis].checked_mul(u64::from(tensor.element_bytes));
    if stride_bytes != Some(tensor.page_stride_bytes) {
        let remedy = format!(
            "it must be strides[{page_axis}] ({}) x element_bytes ({})",
            tensor.strides[page_axis], tensor.element_bytes
        );
        return Err(checked.refuse("page_stride_bytes", tensor.page_stride_bytes, remedy));
    }
    // Sorted by stride; of equal strides the page axis is last. An axis of one element is left out, as its stride has
    // no effect.
    let mut axes: Vec<(u64, bool, u64)> = (0..tensor.shape.len())
        .filter(|axis| tensor.shape[*axis] > 1)
        .map(|axis| (tensor.strides[axis], axis == page_axis, tensor.shape[axis]))
        .collect();
    axes.sort_unstable();
    let mut reach = 1_u64;
    for (stride, counts_pages, length) in axes {
        if stride < reach && counts_pages {
            let remedy = format!(
                "pages would overlap: what lies inside of one reaches over {}",
                reach.saturating_mul(u64::from(tensor.element_bytes))
            );
            return Err(checked.refuse("page_stride_bytes", tensor.page_stride_bytes, remedy));
        }
        if stride < reach {
            let remedy = format!(
                "elements would overlap: the axis with stride {stride} must step over the {reach} \
                 elements that the axes inside it reach"
            );
            return Err(checked.refuse("strides", format!("{:?}", tensor.strides), remedy));
        }
        reach = reach.saturating_add((length - 1).saturating_mul(stride));
    }
    Ok(())
}

/// Checks that the last element ends within the allocation.
fn check_end(checked: &Checked<'_>, registration: &Registration) -> Result<(), RegistrationError> {
    let tensor = checked.tensor;
    let field = format!("tensors[{}].allocation", checked.index);
    let memory = allocation_of(registration, field, tensor.allocation)?;
    let end = tensor
        .shape
        .iter()
        .zip(&tensor.strides)
        .try_fold(1_u64, |reach, (length, stride)| {
            reach.checked_add((length - 1).checked_mul(*stride)?)
        })
        .and_then(|elements| elements.checked_mul(u64::from(tensor.element_bytes)))
        .and_then(|bytes| bytes.checked_add(tensor.offset_bytes));
    if end.is_none_or(|end| end > memory) {
        let remedy = format!(
            "the last page must end within allocations[{}] ({memory} bytes), it ends at {}",
            tensor.allocation,
            end.map_or("more than 64 bits".to_owned(), |end| end.to_string()),
        );
        return Err(checked.refuse("offset_bytes", tensor.offset_bytes, remedy));
    }
    Ok(())
}
