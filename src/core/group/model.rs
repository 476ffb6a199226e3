//! The memory of an engine's model as the leader uses it: its groups, their rules, and the pages of a sequence in each.

use std::sync::Arc;

use crate::group::{GroupError, GroupKind, GroupSpec, Groups};
use crate::index::anchor::{AnchorKey, Domain};
use kvferry_types::{
    Attention, GroupGeometry, GroupId, HashView, MemoryGeometry, PageHashes, TierLayout,
};

/// Domain separator of the fingerprint of several groups.
const FINGERPRINT_DOMAIN: &[u8] = b"kvferry groups 1\0";

/// The geometry of an engine's memory, with what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    geometry: MemoryGeometry,
    groups: Groups,
    page_bytes: u64,
    layout_fingerprint: [u8; 16],
}

impl Model {
    /// Checks the groups.
    ///
    /// # Errors
    /// See [`Groups::new`]. A group of a kind that this version does not know is an error too.
    pub fn new(geometry: MemoryGeometry) -> Result<Self, GroupError> {
        let specs: Result<Vec<GroupSpec>, GroupError> =
            (0..).zip(&geometry.groups).map(spec).collect();
        let groups = Groups::new(geometry.hash_tokens, geometry.hit_tokens, specs?)?;
        Ok(Self {
            page_bytes: geometry.page_bytes(),
            layout_fingerprint: fingerprint(&geometry),
            geometry,
            groups,
        })
    }

    /// Bytes of one page of the lower tiers, which has room for a page of any group.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Digest of everything that changes the meaning of the pages of any group: that of the only group, or of all.
    pub fn layout_fingerprint(&self) -> &[u8; 16] {
        &self.layout_fingerprint
    }

    /// The pages that the tiers below host memory keep of the model.
    pub fn tier_layout(&self) -> TierLayout {
        TierLayout {
            page_bytes: self.page_bytes,
            layout_fingerprint: self.layout_fingerprint,
        }
    }

    /// The sizes that the ranks registered.
    pub fn geometry(&self) -> &MemoryGeometry {
        &self.geometry
    }

    /// The rules of the groups.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The kind of a group; `None` if there is no such group.
    pub(crate) fn kind(&self, group: GroupId) -> Option<GroupKind> {
        let mut specs = self.groups.specs();
        specs.nth(usize::from(group.0)).map(|(_, spec)| spec.kind)
    }

    /// The first page of the cell of a page, from which on the block that holds it may begin. The block of a state begins
    /// with its only page.
    pub(crate) fn first_of_cell(&self, group: GroupId, page: u32, ratio: u32) -> u32 {
        match self.kind(group) {
            Some(GroupKind::State) => page,
            _ => page / ratio * ratio,
        }
    }

    /// Tokens of the unit of the hashes.
    pub fn hash_tokens(&self) -> u32 {
        self.geometry.hash_tokens
    }

    /// Hashes that one page of a group covers.
    pub(crate) fn hashes_per_page(&self, group: GroupId) -> u32 {
        let group = self.geometry.groups.get(usize::from(group.0));
        group.map_or(1, |group| group.engine_page_tokens / self.hash_tokens())
    }

    /// True if all layers are one prefix group whose pages are the units of the hashes and the hits.
    pub(crate) fn is_plain(&self) -> bool {
        let MemoryGeometry {
            hash_tokens,
            hit_tokens,
            groups,
        } = &self.geometry;
        let [only] = &groups[..] else { return false };
        let page = only.engine_page_tokens;
        only.attention == Attention::Full
            && !only.eagle
            && (page, page) == (*hash_tokens, *hit_tokens)
    }
}

fn spec((group, geometry): (u8, &GroupGeometry)) -> Result<GroupSpec, GroupError> {
    let group = GroupId(group);
    let tokens = geometry.window_tokens;
    let kind = match geometry.attention {
        _ if geometry.group != group => return Err(GroupError::Order(geometry.group)),
        Attention::Full => GroupKind::Prefix,
        Attention::SlidingWindow => GroupKind::Window { tokens },
        Attention::ChunkedLocal => GroupKind::Chunk { tokens },
        Attention::State => GroupKind::State,
        Attention::Other => return Err(GroupError::Kind(group)),
    };
    Ok(GroupSpec {
        kind,
        page_tokens: geometry.engine_page_tokens,
        eagle: geometry.eagle,
    })
}

/// The fingerprint of the only group. Of several groups, a digest of their fingerprints and rules, so that memory with
/// other groups shares no page with this one.
fn fingerprint(geometry: &MemoryGeometry) -> [u8; 16] {
    if let [only] = &geometry.groups[..] {
        return only.layout_fingerprint;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(FINGERPRINT_DOMAIN);
    hasher.update(&geometry.hash_tokens.to_le_bytes());
    for group in &geometry.groups {
        hasher.update(group.attention.name().as_bytes());
        hasher.update(&group.window_tokens.to_le_bytes());
        hasher.update(&group.engine_page_tokens.to_le_bytes());
        hasher.update(&group.layout_fingerprint);
    }
    let mut first = [0; 16];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    first
}

/// A sequence in one namespace. Its groups share the hashes.
#[derive(Debug, Clone)]
pub struct Sequence {
    model: Arc<Model>,
    /// The domain of each group.
    domains: Arc<[Domain]>,
    hashes: Arc<PageHashes>,
}

impl Sequence {
    /// The sequence of these hashes.
    pub fn new(model: Arc<Model>, key: &AnchorKey, namespace: &[u8], hashes: PageHashes) -> Self {
        let layout = &model.layout_fingerprint;
        let groups = model.groups.specs().map(|(group, _)| group);
        let domains = groups.map(|group| Domain::new(key, namespace, layout, group));
        Self {
            domains: domains.collect(),
            hashes: Arc::new(hashes),
            model,
        }
    }

    /// The model whose pages it has.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The hashes, one for each unit.
    pub fn hashes(&self) -> &PageHashes {
        &self.hashes
    }

    /// The hashes, for an extension.
    pub fn hashes_mut(&mut self) -> &mut PageHashes {
        Arc::make_mut(&mut self.hashes)
    }

    /// Bytes of the hashes.
    pub fn hash_bytes(&self) -> usize {
        self.hashes.as_bytes().len()
    }

    /// The domain and the page hashes of a group of the model: the parts of requests are checked before.
    ///
    /// # Panics
    ///
    /// If the model does not have the group. Its pages must not be taken for those of another group.
    pub fn of(&self, group: GroupId) -> (&Domain, HashView<'_>) {
        (
            &self.domains[usize::from(group.0)],
            self.hashes.view_of(self.model.hashes_per_page(group)),
        )
    }
}
