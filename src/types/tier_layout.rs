//! Which pages the depots below host memory are open for.

/// The pages that a depot below host memory is open for. A disk keeps pages of different layouts or sizes apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierLayout {
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Fingerprint of the layout of a page.
    pub layout_fingerprint: [u8; 16],
}
