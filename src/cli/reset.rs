//! `kvferry reset`

use std::time::Duration;

use clap::ValueEnum;

use crate::cli::arguments::ClientArguments;
use crate::cli::common::{block_on, print_line};
use crate::cli::{remote::LeaderPlace, status};
use crate::error::CommandError;
use kvferry_types::{
    HASH_BYTES_MAX, HASH_BYTES_MIN, PageHashes, PagesBelow, ResetAnswer, ResetScope, TierId,
};

/// Time limit of a reset: the leader waits for stores in flight, and workers examine every page.
const RESET_LIMIT: Duration = Duration::from_secs(30);

/// A tier that can be reset by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ResetTier {
    /// Host memory.
    G2,
    /// The disk.
    G3,
}

impl From<ResetTier> for TierId {
    fn from(tier: ResetTier) -> Self {
        match tier {
            ResetTier::G2 => Self::Host,
            ResetTier::G3 => Self::Disk,
        }
    }
}

#[derive(Debug, clap::Args)]
#[group(id = "what", required = true, multiple = true)]
pub(super) struct Arguments {
    #[command(flatten)]
    client: ClientArguments,
    /// Remove every page of every namespace.
    #[arg(long, group = "what", conflicts_with_all = ["namespace", "hashes"])]
    all: bool,
    /// Remove the pages of this namespace.
    #[arg(long, group = "what", value_name = "NAME")]
    namespace: Option<String>,
    /// Remove them from this tier only, all of its pages without --namespace; the other tiers keep theirs.
    #[arg(long, group = "what", value_name = "TIER")]
    tier: Option<ResetTier>,
    /// Remove only the pages with these hashes, in hexadecimal digits, and the other pages of their blocks.
    #[arg(long = "hash", value_name = "HEX", requires = "namespace")]
    hashes: Vec<String>,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let scope = scope(self.namespace, &self.hashes)?;
        let nothing = nothing_of(&scope);
        let (_, place) = self.client.load()?;
        let tier = self.tier.map(TierId::from);
        let removed = block_on(1, async move { request(&place, scope, tier).await })?;
        print_line(&forgotten(&removed, &nothing));
        Ok(())
    }
}

/// Says how many pages each tier has lost: a page that two tiers had is no two pages.
fn forgotten(removed: &ResetAnswer, nothing: &str) -> String {
    let PagesBelow { disk, remote } = removed.below_pages;
    let host = removed.pages.saturating_sub(disk).saturating_sub(remote);
    let of_tiers = [
        (host, TierId::Host),
        (disk, TierId::Disk),
        (remote, TierId::Remote),
    ];
    let found = of_tiers.into_iter().filter(|(pages, _)| *pages > 0);
    let found: Vec<String> = found
        .map(|(pages, tier)| format!("{pages} in {tier}"))
        .collect();
    match found.is_empty() {
        true => format!("no page was found{nothing}"),
        false => format!("pages forgotten: {}", found.join(", ")),
    }
}

/// Where a reset found no page: a name without pages may be a typing error.
fn nothing_of(scope: &ResetScope) -> String {
    match scope {
        ResetScope::Everything => String::new(),
        ResetScope::Namespace(namespace) => {
            let namespace = namespace.escape_ascii();
            format!(" in namespace \"{namespace}\"; names are compared byte for byte")
        }
        ResetScope::Pages(namespace, _) => {
            let namespace = namespace.escape_ascii();
            format!(" of these in namespace \"{namespace}\"")
        }
    }
}

fn scope(namespace: Option<String>, hashes: &[String]) -> Result<ResetScope, CommandError> {
    let Some(namespace) = namespace.map(String::into_bytes) else {
        return Ok(ResetScope::Everything);
    };
    let Some(first) = hashes.first() else {
        return Ok(ResetScope::Namespace(namespace));
    };
    let width = first.len() / 2;
    let mut bytes = Vec::new();
    for hash in hashes {
        let refuse = |why: String| CommandError::Config(format!("--hash is '{hash}': {why}"));
        if hash.len() != first.len() {
            return Err(refuse(
                "the hash differs in length from the first".to_owned(),
            ));
        }
        bytes.extend(hex(hash).ok_or_else(|| {
            refuse(format!(
                "{} to {} hexadecimal digits, an even number of them",
                2 * HASH_BYTES_MIN,
                2 * HASH_BYTES_MAX
            ))
        })?);
    }
    let pages = PageHashes::packed(width, bytes).ok_or_else(|| {
        let (least, most) = (2 * HASH_BYTES_MIN, 2 * HASH_BYTES_MAX);
        CommandError::Config(format!(
            "--hash is '{first}': {least} to {most} hexadecimal digits"
        ))
    })?;
    Ok(ResetScope::Pages(namespace, pages))
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| match pair {
        [_, _] if pair.iter().all(u8::is_ascii_hexdigit) => {
            u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()
        }
        _ => None,
    };
    digits.map(byte).collect()
}

async fn request(
    place: &LeaderPlace,
    scope: ResetScope,
    tier: Option<TierId>,
) -> Result<ResetAnswer, CommandError> {
    // Fails sooner, and with a better error, when no leader runs.
    status::request_at(place, false).await?;
    let removed = status::admin_at(place, "reset")
        .reset_tier(scope, tier, RESET_LIMIT)
        .await;
    removed.map_err(CommandError::failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(hashes: &[&str]) -> Result<ResetScope, CommandError> {
        let hashes: Vec<String> = hashes.iter().map(|hash| (*hash).to_owned()).collect();
        scope(Some("a".to_owned()), &hashes)
    }

    #[test]
    fn flags_select_the_scope_of_a_reset() {
        assert_eq!(scope(None, &[]).ok(), Some(ResetScope::Everything));
        assert_eq!(pages(&[]).ok(), Some(ResetScope::Namespace(b"a".to_vec())));
        let hash = "00112233445566778899aabbccddeeFF";
        let bytes: Vec<u8> = (0..=15).map(|digit| digit * 0x11).collect();
        let packed = PageHashes::packed(16, [bytes.clone(), bytes].concat()).expect("16 bytes");
        let expected = ResetScope::Pages(b"a".to_vec(), packed);
        assert_eq!(pages(&[hash, hash]).ok(), Some(expected));
    }

    #[test]
    fn pages_are_counted_by_tier() {
        let removed = |pages, disk| ResetAnswer {
            pages,
            below_pages: PagesBelow::disk(disk),
        };
        assert_eq!(forgotten(&removed(0, 0), ""), "no page was found");
        assert_eq!(forgotten(&removed(3, 3), ""), "pages forgotten: 3 in g3");
        let both = "pages forgotten: 4 in g2, 3 in g3";
        assert_eq!(forgotten(&removed(7, 3), ""), both);
    }

    #[test]
    fn a_reset_that_finds_nothing_names_the_namespace() {
        let namespace = ResetScope::Namespace(b"foo\n".to_vec());
        assert!(nothing_of(&namespace).contains("\"foo\\n\""));
        assert_eq!(nothing_of(&ResetScope::Everything), "");
    }

    #[test]
    fn invalid_hashes_are_refused() {
        let hash = "00112233445566778899aabbccddeeff";
        for wrong in [
            "00112233445566778899aabbccddeef",
            "+0112233445566778899aabbccddeeff",
            "xy",
            "",
        ] {
            let why = pages(&[hash, wrong]).expect_err("refused").to_string();
            assert!(why.contains("--hash is"), "{why}");
            let why = pages(&[wrong]).expect_err("refused").to_string();
            assert!(why.contains("--hash is"), "{why}");
        }
    }
}
