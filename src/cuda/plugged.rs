//! PCI bus ids of this machine's GPUs, as the driver's kernel module lists them.
//!
//! The CUDA driver reports them too, but takes 10 s and more to start on a machine with many unused GPUs, and cannot be
//! unloaded from a process that has started it. Files cost nothing, and are also available to a process that uses no
//! GPU.

use std::fs;
use std::path::Path;

/// Contains a folder for each GPU, named after its bus id.
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// Variable that hides GPUs from a process, and determines the numbers of the visible ones.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Bus id, such as `0000:3b:00.0`, of the GPU with this number among those that this process may use.
///
/// GPUs are counted by bus id. The driver counts a faster model first where a machine has several models; the result
/// may then be the bus id of another GPU.
pub fn bus_id(number: usize) -> Option<String> {
    let visible = std::env::var(VISIBLE).ok();
    visible_in(Path::new(GPUS), visible.as_deref())
        .into_iter()
        .nth(number)
        .flatten()
}

/// A GPU in the kernel module's list.
struct Listed {
    bus_id: String,
    /// In lower case; placeholders or empty where the driver has not determined it yet.
    uuid: String,
}

/// The bus ids of the visible GPUs, in their order; `None` for one that is visible and not known.
fn visible_in(gpus: &Path, visible: Option<&str>) -> Vec<Option<String>> {
    let listed = listed_in(gpus);
    let Some(visible) = visible else {
        return listed.into_iter().map(|gpu| Some(gpu.bus_id)).collect();
    };
    let mut found = Vec::new();
    for name in visible.split(',').map(str::trim) {
        let by_name = |prefix: &str| {
            let prefix = prefix.to_ascii_lowercase();
            let gpu = listed.iter().find(|gpu| gpu.uuid.starts_with(&prefix));
            gpu.map(|gpu| gpu.bus_id.clone())
        };
        // A MIG instance has a UUID of its own, or, with older drivers, the UUID of its GPU and two numbers.
        let place = match (name.parse::<usize>(), name.strip_prefix("MIG-")) {
            (Ok(number), _) => match listed.get(number) {
                Some(gpu) => Some(gpu.bus_id.clone()),
                // Everything after a number that does not exist is hidden, too.
                None => break,
            },
            (Err(_), Some(instance)) => match instance.split_once('/') {
                Some((gpu, _)) => by_name(gpu),
                None => None,
            },
            (Err(_), None) if name.starts_with("GPU-") => by_name(name),
            (Err(_), None) => break,
        };
        found.push(place);
    }
    found
}

/// All GPUs, sorted by bus id.
fn listed_in(gpus: &Path) -> Vec<Listed> {
    let entries = fs::read_dir(gpus).into_iter().flatten().flatten();
    let gpu = |entry: fs::DirEntry| {
        let bus_id = entry.file_name().to_str()?.to_ascii_lowercase();
        let text = fs::read_to_string(entry.path().join("information")).ok()?;
        let uuid = text.lines().find_map(|line| line.strip_prefix("GPU UUID:"));
        let uuid = uuid.unwrap_or_default().trim().to_ascii_lowercase();
        Some(Listed { bus_id, uuid })
    };
    let mut listed: Vec<Listed> = entries.filter_map(gpu).collect();
    listed.sort_by(|one, other| one.bus_id.cmp(&other.bus_id));
    listed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8) -> String {
        format!("0000:{:02x}:00.0", 0x3b + number)
    }

    /// Three GPUs; the driver has not determined the UUID of the last one yet.
    fn machine() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (number, uuid) in [
            (2, "GPU-????????-????-????-????-????????????"),
            (0, "GPU-aaaa0000-0000-0000-0000-000000000000"),
            (1, "GPU-bbbb0000-0000-0000-0000-000000000000"),
        ] {
            let gpu = folder.path().join(gpu(number).to_uppercase());
            fs::create_dir(&gpu).expect("writable");
            let text = format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 77\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nDevice Minor: \t {number}\n"
            );
            fs::write(gpu.join("information"), text).expect("writable");
        }
        folder
    }

    #[test]
    fn gpus_are_counted_as_a_process_sees_them() {
        let folder = machine();
        let (first, second, third) = (Some(gpu(0)), Some(gpu(1)), Some(gpu(2)));
        let all = vec![first.clone(), second.clone(), third.clone()];
        let cases: [(Option<&str>, Vec<Option<String>>); 9] = [
            (None, all),
            (Some(""), vec![]),
            (Some("-1"), vec![]),
            (Some("2,0"), vec![third.clone(), first.clone()]),
            (Some("1,7,0"), vec![second.clone()]),
            (Some("GPU-BBBB"), vec![second.clone()]),
            (Some("GPU-cccc,0"), vec![None, first]),
            (Some("MIG-12345678-0000-0000-0000-000000000000"), vec![None]),
            (
                Some("MIG-GPU-bbbb0000-0000-0000-0000-000000000000/1/0"),
                vec![second],
            ),
        ];
        for (visible, expected) in cases {
            let found = visible_in(folder.path(), visible);
            assert_eq!(found, expected, "{visible:?}");
        }
    }

    #[test]
    fn a_machine_without_gpus_has_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let none = folder.path().join("none");
        assert!(visible_in(&none, None).is_empty());
        assert!(visible_in(&none, Some("0")).is_empty());
    }
}
