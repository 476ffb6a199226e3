//! The processors of a NUMA node. Memory is allocated from the node of the processor that touches it first.

use std::fs;
use std::io;
use std::path::Path;

use rustix::thread::{CpuSet, sched_setaffinity};

const NODES: &str = "/sys/devices/system/node";
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The processors of one node.
#[derive(Debug, Clone)]
pub struct NumaNode {
    number: u16,
    cpus: CpuSet,
}

/// There is no such node, or none with a processor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "g2_numa names node {node}: this machine has the nodes {there} with processors of their own"
)]
pub struct NoSuchNode {
    node: u16,
    there: String,
}

impl NumaNode {
    /// Looks up a node by its number.
    pub fn find(node: u16) -> Result<Self, NoSuchNode> {
        Self::find_in(Path::new(NODES), node)
    }

    fn find_in(nodes: &Path, node: u16) -> Result<Self, NoSuchNode> {
        let list = fs::read_to_string(nodes.join(format!("node{node}/cpulist")));
        let cpus = list.ok().and_then(|list| cpus(&list));
        cpus.map(|cpus| Self { number: node, cpus }).ok_or_else(|| {
            let there = fs::read_to_string(nodes.join("has_cpu")).unwrap_or_default();
            let there = match there.trim() {
                "" => "(none are listed)".to_owned(),
                there => there.to_owned(),
            };
            NoSuchNode { node, there }
        })
    }

    /// The node of a PCI device, by its bus id such as `0000:3b:00.0`. `None` where the machine has one node, does not
    /// report it, or has no processors there.
    pub fn near(bus_id: &str) -> Option<Self> {
        Self::near_in(Path::new(PCI_DEVICES), Path::new(NODES), bus_id)
    }

    fn near_in(devices: &Path, nodes: &Path, bus_id: &str) -> Option<Self> {
        let device = devices.join(bus_id.to_ascii_lowercase());
        let number = fs::read_to_string(device.join("numa_node")).ok()?;
        // -1 means that the node is not known.
        let number = number.trim().parse().ok()?;
        Self::find_in(nodes, number).ok()
    }

    /// Number of the node.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Binds the calling thread to the processors of the node.
    pub(super) fn run_here(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.cpus)?)
    }
}

/// Parses a list such as `0-3,8`; `None` for an empty one. Processors above the maximum of a set are left out.
fn cpus(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        for cpu in first..=last.min(CpuSet::MAX_CPU - 1) {
            set.set(cpu);
        }
    }
    (set.count() > 0).then_some(set)
}

#[cfg(test)]
impl NumaNode {
    /// A node of the processors on which this thread may run.
    pub(super) fn of_this_thread() -> io::Result<Self> {
        let cpus = rustix::thread::sched_getaffinity(None)?;
        Ok(Self { number: 0, cpus })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_kept_on_the_processors_of_its_node() {
        let all = NumaNode::of_this_thread().expect("processors").cpus;
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu));
        let last = last.expect("at least one");
        let kept = std::thread::spawn(move || {
            let cpus = cpus(&last.to_string()).expect("a set");
            let node = NumaNode { number: 0, cpus };
            node.run_here().expect("one that it may run on");
            NumaNode::of_this_thread().expect("processors").cpus
        });
        let kept = kept.join().expect("no panic");
        assert_eq!((kept.count(), kept.is_set(last)), (1, true));
    }

    fn listed(list: &str) -> Vec<usize> {
        let set = cpus(list).expect("processors");
        (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect()
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(listed("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(listed("3\n"), [3]);
        assert!(cpus("\n").is_none());
        assert!(cpus("x").is_none());
        assert!(cpus("0-99999999999").is_some(), "no more than a set holds");
    }

    #[test]
    fn the_node_of_a_device_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        write("node1/cpulist", "0\n");
        write("0000:3b:00.0/numa_node", "1\n");
        write("0000:3c:00.0/numa_node", "-1\n");
        write("0000:3d:00.0/numa_node", "7\n");
        let near = |bus_id: &str| NumaNode::near_in(folder.path(), folder.path(), bus_id);
        assert_eq!(near("0000:3B:00.0").map(|node| node.number()), Some(1));
        for unknown in ["0000:3c:00.0", "0000:3d:00.0", "0000:3e:00.0"] {
            assert!(near(unknown).is_none(), "{unknown}");
        }
    }

    #[test]
    fn a_missing_node_is_named_with_the_existing_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let node = folder.path().join("node1");
        fs::create_dir(&node).expect("writable");
        fs::write(node.join("cpulist"), "0\n").expect("writable");
        fs::write(folder.path().join("has_cpu"), "1\n").expect("writable");
        assert!(NumaNode::find_in(folder.path(), 1).is_ok());
        let error = NumaNode::find_in(folder.path(), 7).expect_err("no node 7");
        assert_eq!(
            error.to_string(),
            "g2_numa names node 7: this machine has the nodes 1 with processors of their own"
        );
    }
}
