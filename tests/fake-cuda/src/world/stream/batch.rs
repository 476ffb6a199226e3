//! Many copies with one call. Their descriptions are read at the call, and again when the stream reaches them: a caller
//! that frees or changes them in between gets wrong copies.
#![expect(
    unsafe_code,
    reason = "reads lists at addresses that the callers of a driver give"
)]

use std::ffi::c_uint;

use crate::code::{Code, ILLEGAL_ADDRESS, INVALID_VALUE};
use crate::memory::take;
use crate::world::World;
use crate::world::stream::Work;

/// Access orders of a source: 1 in stream order, 2 during the call, 3 any.
const ACCESS_ORDERS: std::ops::RangeInclusive<c_uint> = 1..=3;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    source_access_order: c_uint,
    _hints: [c_uint; 4],
    _flags: c_uint,
}

/// Addresses of the lists that describe the copies of a call.
#[derive(Clone, Copy)]
pub(crate) struct Lists {
    pub(crate) to: *const u64,
    pub(crate) from: *const u64,
    pub(crate) bytes: *const usize,
    pub(crate) count: usize,
    pub(crate) attributes: *const Attributes,
    pub(crate) attributes_of: *const usize,
    pub(crate) attributes_count: usize,
}

/// Copies that a stream has not reached yet.
pub(crate) struct Batch {
    lists: Lists,
    /// Base of each copy's registered host memory, which must still be registered when the copy runs.
    pinned: Vec<Option<u64>>,
}

// SAFETY: the lists are at addresses that the caller promised to leave unchanged; any thread may read them.
unsafe impl Send for Batch {}

/// One copy, as its description reads now.
#[derive(Clone, Copy)]
struct Described {
    to: u64,
    from: u64,
    bytes: usize,
}

impl Lists {
    fn read(&self, index: usize) -> Result<Described, Code> {
        Ok(Described {
            to: take(self.to.wrapping_add(index))?,
            from: take(self.from.wrapping_add(index))?,
            bytes: take(self.bytes.wrapping_add(index))?,
        })
    }

    fn check_attributes(&self) -> Result<(), Code> {
        if !(1..=self.count).contains(&self.attributes_count) || take(self.attributes_of)? != 0 {
            return Err(INVALID_VALUE);
        }
        (0..self.attributes_count).try_for_each(|index| {
            let attributes = take(self.attributes.wrapping_add(index))?;
            let known = ACCESS_ORDERS.contains(&attributes.source_access_order);
            known.then_some(()).ok_or(INVALID_VALUE)
        })
    }

    /// Checks the whole list, as the driver does before it accepts any copy, then gives the copies to a stream.
    pub(crate) fn give(self, world: &World, stream: u64) -> Result<(), Code> {
        if self.count == 0 || stream == 0 {
            return Err(INVALID_VALUE);
        }
        self.check_attributes()?;
        let pinned = (0..self.count).map(|index| {
            let Described { to, from, bytes } = self.read(index)?;
            if bytes == 0 {
                return Err(INVALID_VALUE);
            }
            world.check_copy(to, from, bytes)
        });
        let mut pinned = pinned.collect::<Result<Vec<_>, _>>()?;
        let lists = self;
        let number = world.next_batch();
        if let Some((nth, folder)) = &world.settings().hang
            && *nth == number
        {
            let note = format!("{folder}/{}", std::process::id());
            if let Err(error) = std::fs::write(&note, "") {
                crate::settings::complain(&format!("{note}: {error}"));
            }
            crate::settings::complain("a call for many copies hangs, as wanted");
            return world.give(stream, Work::Hang);
        }
        if world.settings().half == Some(number) {
            pinned.truncate(self.count / 2);
            world.give(stream, Work::Batch(Batch { lists, pinned }))?;
            return Err(INVALID_VALUE);
        }
        world.give(stream, Work::Batch(Batch { lists, pinned }))
    }
}

impl Batch {
    /// Runs the copies in random order, because the driver guarantees none.
    pub(crate) fn run(&self, world: &World, chance: &mut fastrand::Rng) -> Result<(), Code> {
        self.lists.check_attributes()?;
        let mut order: Vec<usize> = (0..self.pinned.len()).collect();
        chance.shuffle(&mut order);
        for index in order {
            let Described { to, from, bytes } = self.lists.read(index)?;
            if self.pinned[index].is_some() && !world.settings().host_pointers() {
                return Err(ILLEGAL_ADDRESS);
            }
            world.copy(to, from, bytes, self.pinned[index])?;
        }
        Ok(())
    }
}
