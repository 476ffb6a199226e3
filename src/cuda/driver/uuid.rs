//! UUIDs of GPUs, which are equal in all processes.

use std::hash::{Hash, Hasher};

/// UUID of 16 bytes of a GPU, or of one MIG instance of it: the device that a process computes on. Equal in all
/// processes.
#[derive(Clone, Copy)]
pub struct DeviceUuid {
    bytes: [u8; 16],
    /// A MIG instance. Only affects how the UUID is written: two UUIDs are equal when their bytes are.
    instance: bool,
}

impl DeviceUuid {
    /// The UUID of a whole GPU.
    pub const fn gpu(bytes: [u8; 16]) -> Self {
        Self {
            bytes,
            instance: false,
        }
    }

    /// The UUID of a MIG instance.
    pub const fn instance(bytes: [u8; 16]) -> Self {
        Self {
            bytes,
            instance: true,
        }
    }

    /// Whether this is the UUID of a MIG instance.
    pub const fn is_instance(&self) -> bool {
        self.instance
    }
}

impl PartialEq for DeviceUuid {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for DeviceUuid {}

impl Hash for DeviceUuid {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

impl std::fmt::Display for DeviceUuid {
    /// Writes the UUID as `nvidia-smi -L` does.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.instance { "MIG-" } else { "GPU-" })?;
        for (index, byte) in self.bytes.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for DeviceUuid {
    type Err = ();

    /// Parses a UUID with the prefix `GPU-` or `MIG-`, or without one.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (text, instance) = match text.strip_prefix("MIG-") {
            Some(text) => (text, true),
            None => (text.strip_prefix("GPU-").unwrap_or(text), false),
        };
        let digits: String = text.chars().filter(|each| *each != '-').collect();
        let number = u128::from_str_radix(&digits, 16).map_err(|_| ())?;
        match digits.len() {
            32 => Ok(Self {
                bytes: number.to_be_bytes(),
                instance,
            }),
            _ => Err(()),
        }
    }
}
