//! NUMA nodes, as Linux counts them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Shard;

/// Limit on the named nodes.
const NODES_MAX: usize = 64;

/// The NUMA node of each KV shard's host memory: the first node is for shard 0, and so on, starting over where there
/// are more shards. Written `0,1`. An empty list, written as an empty text, leaves the placement to the system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NumaNodes(Vec<u16>);

/// The text is not a list of nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no list of up to 64 node numbers such as 0,1")]
pub struct ParseNumaNodesError(String);

impl NumaNodes {
    /// The node of a shard; `None` when no node is named.
    pub fn of(&self, shard: Shard) -> Option<u16> {
        let index = usize::from(shard.0).checked_rem(self.0.len())?;
        self.0.get(index).copied()
    }
}

impl FromStr for NumaNodes {
    type Err = ParseNumaNodesError;

    fn from_str(text: &str) -> Result<Self, ParseNumaNodesError> {
        let numbers = text.split(',').map(|number| number.trim().parse());
        let nodes = match text.trim().is_empty() {
            true => Ok(Vec::new()),
            false => numbers.collect::<Result<Vec<u16>, _>>(),
        };
        let nodes = nodes.ok().filter(|nodes| nodes.len() <= NODES_MAX);
        nodes
            .map(Self)
            .ok_or_else(|| ParseNumaNodesError(text.to_owned()))
    }
}

impl TryFrom<String> for NumaNodes {
    type Error = ParseNumaNodesError;

    fn try_from(text: String) -> Result<Self, ParseNumaNodesError> {
        text.parse()
    }
}

impl From<NumaNodes> for String {
    fn from(nodes: NumaNodes) -> Self {
        nodes.to_string()
    }
}

impl fmt::Display for NumaNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u16::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_take_the_nodes_in_turn() {
        let nodes: NumaNodes = " 1, 0 ".parse().expect("two nodes");
        let found = [0, 1, 2].map(|shard| nodes.of(Shard(shard)));
        assert_eq!(found, [Some(1), Some(0), Some(1)]);
        assert_eq!(nodes.to_string(), "1,0");
        let none: NumaNodes = "".parse().expect("none");
        assert_eq!((none.of(Shard(3)), none.to_string()), (None, String::new()));
    }

    #[test]
    fn texts_that_are_no_list_of_nodes_are_refused() {
        for text in [
            "a",
            "0,",
            "-1",
            "65536",
            "0;1",
            &"0,".repeat(64)[..],
            &format!("0{}", ",0".repeat(64)),
        ] {
            assert!(text.parse::<NumaNodes>().is_err(), "{text}");
        }
    }
}
