//! Whether the file systems of a disk tier have room for it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvferry_types::ByteSize;

/// A file system that is smaller than the part of a disk tier that it has to hold.
#[derive(Debug, PartialEq, Eq)]
struct SmallFileSystem {
    /// The first directory of the tier on it.
    directory: PathBuf,
    /// The part of the tier.
    part: ByteSize,
    /// Bytes of the file system, used and free.
    size: ByteSize,
}

/// The file systems that are too small for `g3`, of which each directory has an equal part. `of` gives the number of the file
/// system of a directory, and its size.
fn small_file_systems(
    g3: ByteSize,
    directories: &[PathBuf],
    of: impl Fn(&Path) -> std::io::Result<(u64, u64)>,
) -> std::io::Result<Vec<SmallFileSystem>> {
    let mut parts: Vec<(u64, SmallFileSystem)> = Vec::new();
    let share = g3.0 / directories.len().max(1) as u64;
    for directory in directories {
        let (number, size) = of(directory)?;
        match parts.iter_mut().find(|(other, _)| *other == number) {
            Some((_, known)) => known.part.0 += share,
            None => {
                let part = SmallFileSystem {
                    directory: directory.clone(),
                    part: ByteSize(share),
                    size: ByteSize(size),
                };
                parts.push((number, part));
            }
        }
    }
    parts.retain(|(_, found)| found.part > found.size);
    Ok(parts.into_iter().map(|(_, found)| found).collect())
}

/// Says at once that a disk tier cannot become as large as its cap, and not when a disk is full.
pub(super) fn warn_of_small_disks(g3: ByteSize, directories: &[PathBuf]) {
    let found = small_file_systems(g3, directories, |directory| {
        let size = rustix::fs::statvfs(directory)?;
        let size = size.f_blocks.saturating_mul(size.f_frsize);
        Ok((directory.metadata()?.dev(), size))
    });
    match found {
        Ok(small) => small.iter().for_each(|small| {
            tracing::warn!(
                "g3 needs {} in {}, and its file system has {}: the disk uses what there is; give g3 less, or a larger file \
                 system",
                small.part,
                small.directory.display(),
                small.size
            );
        }),
        Err(error) => tracing::debug!(%error, "the sizes of the file systems of g3_dir"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_one_file_system_share_its_room() {
        let small = |g3: u64, sizes: &[(&str, u64, u64)]| {
            let directories: Vec<PathBuf> = sizes.iter().map(|(path, ..)| path.into()).collect();
            let of = |directory: &Path| {
                let found = sizes.iter().find(|(path, ..)| Path::new(path) == directory);
                let (_, number, size) = found.expect("named");
                Ok((*number, *size))
            };
            let found = small_file_systems(ByteSize(g3), &directories, of).expect("sizes");
            let found = found.into_iter();
            let found =
                found.map(|one| (one.directory.display().to_string(), one.part.0, one.size.0));
            found.collect::<Vec<_>>()
        };
        assert_eq!(small(100, &[("/a", 1, 100)]), []);
        assert_eq!(small(101, &[("/a", 1, 100)]), [("/a".to_owned(), 101, 100)]);
        // One file system for each directory, or one for both.
        assert_eq!(small(200, &[("/a", 1, 100), ("/b", 2, 100)]), []);
        let shared = small(200, &[("/a", 1, 100), ("/b", 1, 100)]);
        assert_eq!(shared, [("/a".to_owned(), 200, 100)]);
        // The sum has room, and one of them has not.
        let one = small(200, &[("/a", 1, 40), ("/b", 2, 900)]);
        assert_eq!(one, [("/a".to_owned(), 100, 40)]);
    }
}
