//! The file of the setting `namespaces`.
//!
//! Each entry has a prefix, the users whose engines may name namespaces that begin with it, and limits.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use crate::config::{CONFIG_BYTES_MAX, Config, UNKNOWN_UID};
use crate::error::CommandError;
use kvferry_core::{NAMESPACE_RULES_MAX, NamespaceRule, NamespaceSecret, Namespaces};
use kvferry_protocol::limits::NAMESPACE_BYTES_MAX;
use kvferry_transport::{FileRefused, Readers, own_uid, read_trusted};
use kvferry_types::{PerTier, TierId, User};

/// Users of one entry, at most.
const USERS_OF_ENTRY_MAX: usize = 64;
/// Characters of a line that an error repeats.
const SHOWN_MAX: usize = 80;
/// Fewest bytes of a secret: too many to find it by trying all values.
const SECRET_BYTES_MIN: usize = 16;
/// Most bytes of a secret.
const SECRET_BYTES_MAX: usize = 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    #[serde(default)]
    namespace: Vec<Spanned<Entry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    prefix: Spanned<String>,
    users: Spanned<Vec<Spanned<i64>>>,
    held_pages: Option<Spanned<i64>>,
    g2_pages: Option<Spanned<i64>>,
    g3_pages: Option<Spanned<i64>>,
    secret_file: Option<Spanned<PathBuf>>,
}

/// Reads the rules of the setting; without the setting there are none.
///
/// # Errors
/// The line, the field, its value and the remedy.
pub(super) fn load(config: &Config) -> Result<Namespaces, CommandError> {
    let path = &config.namespaces;
    if path.as_os_str().is_empty() {
        return Ok(Namespaces::default());
    }
    let bytes = read_checked(path, "namespaces", Readers::All, CONFIG_BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| {
        let path = path.display();
        CommandError::Config(format!("namespaces {path} is not UTF-8: write it as TOML"))
    })?;
    let reader = FileReader {
        path,
        text: &text,
        own: own_uid(),
    };
    Ok(Namespaces::new(reader.rules()?))
}

/// Logs which users share pages that they may want apart, which cannot connect, and limits without effect.
pub(super) fn log_doubts(config: &Config, namespaces: &Namespaces) {
    if config.namespaces.as_os_str().is_empty() && !config.users.others().is_empty() {
        tracing::warn!(
            users = %config.users,
            "users is set and namespaces is not: the engines of all users share all pages"
        );
    }
    for (uid, prefix) in unreachable_users(config, namespaces.rules()) {
        tracing::warn!(
            uid,
            prefix,
            "namespaces names a user that the setting users does not: it cannot connect"
        );
    }
    let on_disk = |rule: &&NamespaceRule| rule.stored_pages.get(TierId::Disk).is_some();
    if config.g3.0 == 0
        && let Some(rule) = namespaces.rules().iter().find(on_disk)
    {
        let prefix = rule.prefix.escape_ascii().to_string();
        tracing::warn!(
            prefix,
            "namespaces has g3_pages, which have no effect without g3"
        );
    }
}

/// The users of entries whose processes cannot connect, with the prefix of the first such entry.
fn unreachable_users(config: &Config, rules: &[NamespaceRule]) -> BTreeMap<u32, String> {
    let mut found = BTreeMap::new();
    for rule in rules.iter().rev() {
        for user in &rule.users {
            if let User::Other(uid) = user
                && !config.users.contains(*uid)
            {
                found.insert(*uid, rule.prefix.escape_ascii().to_string());
            }
        }
    }
    found
}

/// Reads the file of a setting.
fn read_checked(
    path: &Path,
    setting: &str,
    readers: Readers,
    bytes_max: u64,
) -> Result<Vec<u8>, CommandError> {
    read_trusted(path, readers, bytes_max).map_err(|FileRefused { problem, remedy }| {
        let remedy = remedy.as_deref().unwrap_or("name another file");
        CommandError::Config(format!("{setting} {} {problem}: {remedy}", path.display()))
    })
}

/// The text of the file, for errors with lines.
struct FileReader<'a> {
    path: &'a Path,
    text: &'a str,
    /// Id of kvferry's own user.
    own: u32,
}

impl FileReader<'_> {
    fn refuse<T>(&self, at: usize, problem: &str) -> Result<T, CommandError> {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = 1 + before.matches('\n').count();
        let path = self.path.display();
        Err(CommandError::Config(format!(
            "namespaces {path}, line {line}: {problem}"
        )))
    }

    fn rules(&self) -> Result<Vec<NamespaceRule>, CommandError> {
        let contents: Contents = match toml::from_str(self.text) {
            Ok(contents) => contents,
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start);
                let line = self
                    .text
                    .get(..at)
                    .map_or(0, |before| before.matches('\n').count());
                let line = self.text.lines().nth(line).unwrap_or_default().trim();
                let line: String = line.chars().take(SHOWN_MAX).collect();
                let text = format!(
                    "{} in `{line}`: entries are [[namespace]] with prefix, users, held_pages, g2_pages, g3_pages and secret_file",
                    error.message().trim_end()
                );
                return self.refuse(at, &text);
            }
        };
        let entries = contents.namespace;
        if let Some(more) = entries.get(NAMESPACE_RULES_MAX) {
            let text = format!("namespace has more than {NAMESPACE_RULES_MAX} entries: give fewer");
            return self.refuse(more.span().start, &text);
        }
        let mut rules: Vec<NamespaceRule> = Vec::with_capacity(entries.len());
        for entry in entries {
            let entry = entry.into_inner();
            let at = entry.prefix.span().start;
            let rule = self.rule(entry)?;
            if rules.iter().any(|other| other.prefix == rule.prefix) {
                let prefix = rule.prefix.escape_ascii();
                let text =
                    format!("prefix is '{prefix}', as in an entry before: give one entry for it");
                return self.refuse(at, &text);
            }
            rules.push(rule);
        }
        Ok(rules)
    }

    fn rule(&self, entry: Entry) -> Result<NamespaceRule, CommandError> {
        let prefix = entry.prefix.get_ref().clone().into_bytes();
        if prefix.len() > NAMESPACE_BYTES_MAX {
            let text = format!(
                "prefix has {} bytes: a namespace has at most {NAMESPACE_BYTES_MAX}",
                prefix.len()
            );
            return self.refuse(entry.prefix.span().start, &text);
        }
        let ids = entry.users.get_ref();
        if ids.is_empty() || ids.len() > USERS_OF_ENTRY_MAX {
            let text = format!(
                "users has {} ids: give 1 to {USERS_OF_ENTRY_MAX}, such as [1001]",
                ids.len()
            );
            return self.refuse(entry.users.span().start, &text);
        }
        let users = ids.iter().map(|id| {
            let uid = u32::try_from(*id.get_ref()).ok();
            let uid = uid.filter(|uid| *uid != UNKNOWN_UID && *uid != u32::MAX);
            match uid {
                Some(uid) if uid == self.own => Ok(User::Own),
                Some(uid) => Ok(User::Other(uid)),
                None => {
                    let text = format!(
                        "users has {}: give ids of users, not {UNKNOWN_UID}, which stands for those of other user namespaces",
                        id.get_ref()
                    );
                    self.refuse(id.span().start, &text)
                }
            }
        });
        let held_pages = entry.held_pages.as_ref();
        let held_pages = held_pages
            .map(|pages| self.pages(("held_pages", i64::MAX as u64), pages, NonZeroU64::new));
        let mut stored_pages = PerTier::default();
        let in_tiers = [
            (TierId::Host, "g2_pages", &entry.g2_pages),
            (TierId::Disk, "g3_pages", &entry.g3_pages),
        ];
        for (tier, field, pages) in in_tiers {
            if let Some(pages) = pages {
                let in_bounds = |pages| u32::try_from(pages).ok().filter(|pages| *pages > 0);
                let pages = self.pages((field, u32::MAX.into()), pages, in_bounds)?;
                stored_pages.insert(tier, pages);
            }
        }
        let secret = entry.secret_file.map(|file| self.secret(&file));
        Ok(NamespaceRule {
            prefix,
            users: users.collect::<Result<_, _>>()?,
            held_pages: held_pages.transpose()?,
            stored_pages,
            secret: secret.transpose()?,
        })
    }

    /// A number of pages above 0, for a field with this largest value.
    fn pages<T>(
        &self,
        (field, max): (&str, u64),
        pages: &Spanned<i64>,
        read: impl FnOnce(u64) -> Option<T>,
    ) -> Result<T, CommandError> {
        let number = u64::try_from(*pages.get_ref()).ok();
        number.and_then(read).map_or_else(
            || {
                let text = format!(
                    "{field} is {}: give 1 to {max} pages, or leave it out for no limit",
                    pages.get_ref()
                );
                self.refuse(pages.span().start, &text)
            },
            Ok,
        )
    }

    fn secret(&self, file: &Spanned<PathBuf>) -> Result<NamespaceSecret, CommandError> {
        let (at, path) = (file.span().start, file.get_ref());
        if !path.is_absolute() {
            let text = format!("secret_file is '{}': give an absolute path", path.display());
            return self.refuse(at, &text);
        }
        let read = read_checked(
            path,
            "secret_file",
            Readers::OwnGroups,
            SECRET_BYTES_MAX as u64,
        );
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(error) => return self.refuse(at, &error.to_string()),
        };
        if bytes.len() < SECRET_BYTES_MIN {
            let text = format!(
                "secret_file {} has {} bytes: give {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random ones",
                path.display(),
                bytes.len()
            );
            return self.refuse(at, &text);
        }
        Ok(NamespaceSecret::new(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    /// A file below a folder of its own, readable by its owner alone.
    fn file(folder: &Path, name: &str, contents: &[u8]) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, contents).expect("written");
        set_mode(&path, 0o600);
        path
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
    }

    fn loaded(path: &Path, users: &str) -> Result<Namespaces, String> {
        let variables = [
            ("KVFERRY_NAMESPACES".into(), path.into()),
            ("KVFERRY_USERS".into(), users.into()),
        ];
        let config = Config::load_with(None, variables, &crate::config::Flags::default());
        load(&config.expect("settings")).map_err(|error| error.to_string())
    }

    fn refused(text: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        loaded(&file(folder.path(), "n.toml", text.as_bytes()), "").expect_err(text)
    }

    #[test]
    fn entries_are_read_with_their_users_limits_and_secrets() {
        let folder = tempfile::tempdir().expect("a folder");
        let secret = file(folder.path(), "secret", &[7; 32]);
        let text = format!(
            "[[namespace]]\nprefix = 'a/'\nusers = [1001]\nheld_pages = 9\ng2_pages = 70\ng3_pages = 800\nsecret_file = '{}'\n\n\
             [[namespace]]\nprefix = ''\nusers = [{}, 1002]\n",
            secret.display(),
            own_uid()
        );
        let path = file(folder.path(), "n.toml", text.as_bytes());
        let read = loaded(&path, "1001,1002").expect("good");
        let [of_a, rest] = read.rules() else {
            panic!("{read:?}");
        };
        assert_eq!(of_a.prefix, b"a/");
        assert_eq!(of_a.users, [User::Other(1001)].into());
        assert_eq!(of_a.held_pages, NonZeroU64::new(9));
        let stored = [(TierId::Host, 70), (TierId::Disk, 800)];
        assert_eq!(of_a.stored_pages, stored.into_iter().collect());
        assert_eq!(of_a.secret, Some(NamespaceSecret::new(&[7; 32])));
        assert_eq!(rest.users, [User::Own, User::Other(1002)].into());
        assert_eq!((rest.held_pages, &rest.secret), (None, &None));
        assert_eq!(rest.stored_pages, PerTier::default());
        let none = loaded(Path::new(""), "1001").expect("no file");
        assert!(none.permits(User::Other(1001), b"a/"));
        let empty = loaded(&file(folder.path(), "e.toml", b""), "1001").expect("good");
        assert!(!empty.permits(User::Other(1001), b"a/") && empty.permits(User::Own, b"a/"));
    }

    #[test]
    fn errors_name_the_line_the_field_the_value_and_the_remedy() {
        let entry = "[[namespace]]\nprefix = 'a/'\nusers = [1001]\n";
        let long = format!(
            "[[namespace]]\nprefix = '{}'\nusers = [1]\n",
            "x".repeat(1025)
        );
        let many = (0..=NAMESPACE_RULES_MAX)
            .map(|n| format!("[[namespace]]\nprefix = '{n}'\nusers = [1]\n"));
        let cases = [
            ("[[namespace]\n".to_owned(), "line 1: "),
            (
                format!("{entry}pages = 3\n"),
                "line 4: unknown field `pages`",
            ),
            (
                "[[namespace]]\nprefix = 'a/'\n".to_owned(),
                "line 1: missing field `users`",
            ),
            (
                "[[namespace]]\nprefix = 'a/'\nusers = ['alice']\n".to_owned(),
                "line 3: invalid type: string \"alice\", expected i64 in `users = ['alice']`",
            ),
            (
                "[[namespace]]\nprefix = 'a/'\nusers = []\n".to_owned(),
                "line 3: users has 0 ids: give 1 to 64",
            ),
            (
                "[[namespace]]\nprefix = 'a/'\nusers = [1, -2]\n".to_owned(),
                "line 3: users has -2: give ids",
            ),
            (
                "[[namespace]]\nprefix = 'a/'\nusers = [65534]\n".to_owned(),
                "line 3: users has 65534: give ids",
            ),
            (
                format!("{entry}held_pages = 0\n"),
                "line 4: held_pages is 0: give 1 to",
            ),
            (
                format!("{entry}g2_pages = -1\n"),
                "line 4: g2_pages is -1: give 1 to",
            ),
            (
                format!("{entry}g3_pages = 4294967296\n"),
                "line 4: g3_pages is 4294967296: give 1 to 4294967295",
            ),
            (
                format!("{entry}secret_file = 'x'\n"),
                "line 4: secret_file is 'x': give an absolute path",
            ),
            (
                format!("{entry}secret_file = '/none'\n"),
                "line 4: secret_file /none cannot be read (No such file",
            ),
            (
                format!("{entry}\n{entry}"),
                "line 6: prefix is 'a/', as in an entry before",
            ),
            (long, "line 2: prefix has 1025 bytes"),
            (
                many.collect(),
                "line 769: namespace has more than 256 entries",
            ),
        ];
        for (text, expected) in cases {
            let error = refused(&text);
            assert!(error.contains(expected), "{error}\nlacks {expected}");
        }
    }

    #[test]
    fn files_that_others_can_write_and_secrets_that_others_can_read_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = file(folder.path(), "n.toml", b"");
        for (mode, good) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            set_mode(&path, mode);
            let read = loaded(&path, "");
            assert_eq!(read.is_ok(), good, "{mode:o}: {read:?}");
            let remedy = format!("run chmod {:03o} {}", mode & !0o022, path.display());
            assert!(good || read.expect_err("refused").contains(&remedy));
        }
        let secret = file(folder.path(), "secret", &[7; 15]);
        let text = format!(
            "[[namespace]]\nprefix = 'a'\nusers = [1]\nsecret_file = '{}'\n",
            secret.display()
        );
        let path = file(folder.path(), "s.toml", text.as_bytes());
        let error = loaded(&path, "").expect_err("short");
        assert!(error.contains("has 15 bytes: give 16 to 1024"), "{error}");
        fs::write(&secret, [7; 16]).expect("written");
        assert!(loaded(&path, "").is_ok());
        set_mode(&secret, 0o644);
        let error = loaded(&path, "").expect_err("readable by others");
        assert!(error.contains("chmod 640"), "{error}");
        set_mode(&secret, 0o600);
        fs::write(&secret, [7; 1025]).expect("written");
        let error = loaded(&path, "").expect_err("long");
        assert!(error.contains("more than 1024 bytes"), "{error}");
        let error = loaded(folder.path(), "").expect_err("a folder");
        assert!(error.contains("no regular file"), "{error}");
    }
}
