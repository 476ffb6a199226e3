//! The input of a target as a list of choices.

/// Reads choices from bytes. At the end of the bytes every choice is 0.
#[derive(Debug, Clone)]
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    /// Up to `most` bytes.
    pub(crate) fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number below `end`, which is at most 256.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    /// One of these.
    pub(crate) fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True once in 16 times.
    pub(crate) fn rarely(&mut self) -> bool {
        self.byte() & 15 == 15
    }

    /// A number that is small most of the time, and otherwise at a border of its type.
    pub(crate) fn number(&mut self) -> u64 {
        const BORDERS: [u64; 16] = [
            255,
            256,
            65_535,
            65_536,
            1 << 20,
            (1 << 31) - 1,
            1 << 31,
            u32::MAX as u64 - 2,
            u32::MAX as u64 - 1,
            u32::MAX as u64,
            1 << 32,
            1 << 48,
            i64::MAX as u64,
            1 << 63,
            u64::MAX - 1,
            u64::MAX,
        ];
        match self.byte() {
            small @ 0..=223 => u64::from(small),
            border @ 224..=239 => BORDERS[usize::from(border - 224)],
            _ => {
                let mut bytes = [0; 8];
                let given = self.bytes(4);
                bytes[..given.len()].copy_from_slice(given);
                u64::from_le_bytes(bytes)
            }
        }
    }

    /// The same in 32 bits; larger ones are cut.
    pub(crate) fn number32(&mut self) -> u32 {
        u32::try_from(self.number()).unwrap_or(u32::MAX)
    }

    /// The same in 16 bits; larger ones are cut.
    pub(crate) fn number16(&mut self) -> u16 {
        u16::try_from(self.number()).unwrap_or(u16::MAX)
    }
}
