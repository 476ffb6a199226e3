//! One side of a plan, as its registration describes it.

use kvferry_types::{
    Attention, GroupMemory, Registration, Slices, StatePart, TensorRole, TensorView,
};

use crate::error::{At, PlanError, PlanSide};

/// One engine of a transfer. Every rank registers memory of the same form, so that one registration describes all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    pub(crate) name: PlanSide,
    /// Ranks of the engine, or shards of its KV: see [`Side::shards`].
    pub(crate) ranks: u16,
    pub(crate) content: Vec<u8>,
    pub(crate) hash_tokens: u32,
    /// By id.
    pub(crate) groups: Vec<SideGroup>,
}

/// One group of a side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideGroup {
    pub(crate) attention: Attention,
    pub(crate) window_tokens: u32,
    pub(crate) page_tokens: u32,
    pub(crate) layers: u32,
    /// In order of (layer, role), as they lie in a page of the lower tiers.
    pub(crate) tensors: Vec<SideTensor>,
}

/// The bytes of one (layer, role) in a page of the lower tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SideTensor {
    pub(crate) layer: u32,
    pub(crate) role: TensorRole,
    /// Start in the page.
    pub(crate) offset_bytes: u64,
    pub(crate) page_bytes: u64,
    /// The axes inside a page, outermost first. The bytes of an element are the innermost one; neighbouring axes that
    /// count the same are one.
    pub(crate) axes: Vec<Axis>,
    /// The axes inside a page as registered, by their place in the shape, and their lengths; in memory order, the innermost
    /// first, without those of one index.
    pub(crate) registered: Vec<(u32, u64)>,
    pub(crate) slices: Option<Slices>,
}

/// One axis inside a page, in its memory order and without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) counts: Counts,
    pub(crate) length: u64,
    /// Bytes from one index to the next.
    pub(crate) step_bytes: u64,
}

/// What an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    Heads,
    Tokens,
    /// Something that both sides have alike, such as elements of a head.
    Other,
}

impl Side {
    /// Takes one side from the registration of any of its ranks.
    ///
    /// # Errors
    ///
    /// Fields that contradict each other, as far as the plan depends on them.
    pub fn of(name: PlanSide, registration: &Registration) -> Result<Self, PlanError> {
        let groups = registration.groups.iter().enumerate();
        let groups = groups.map(|(id, group)| SideGroup::of(name, registration.tp_size, id, group));
        let side = Self {
            name,
            ranks: registration.tp_size,
            content: registration.content.clone(),
            hash_tokens: registration.units().0,
            groups: groups.collect::<Result<_, _>>()?,
        };
        if side.ranks == 0 {
            return Err(contradiction(
                name,
                At::Registration,
                "tp_size",
                0,
                "an engine has a rank".to_owned(),
            ));
        }
        Ok(side)
    }

    /// The same side with the shards of its KV in place of its ranks, so that every slice is fetched once, however many
    /// ranks hold it. `shards`: the number of different slices.
    ///
    /// # Errors
    ///
    /// Other numbers than the registration allows: as many as ranks, or as KV heads if these are fewer.
    pub fn shards(mut self, shards: u16) -> Result<Self, PlanError> {
        for (id, group) in self.groups.iter().enumerate() {
            for tensor in &group.tensors {
                let held = match &tensor.slices {
                    Some(Slices::Heads { kv_heads, .. }) => {
                        u64::from(*kv_heads).min(u64::from(self.ranks))
                    }
                    Some(Slices::Whole { .. }) => 1,
                    Some(Slices::Parts { .. } | Slices::Other) | None => u64::from(self.ranks),
                };
                let (shards, ranks) = (u64::from(shards), u64::from(self.ranks));
                if shards == 0 || shards % held != 0 || ranks % shards != 0 {
                    let at = At::Tensor(id, tensor.layer, tensor.role);
                    let expected = format!("its {} ranks hold {held} different slices", self.ranks);
                    return Err(contradiction(self.name, at, "shards", shards, expected));
                }
            }
        }
        self.ranks = shards;
        Ok(self)
    }
}

impl SideGroup {
    fn of(name: PlanSide, ranks: u16, id: usize, group: &GroupMemory) -> Result<Self, PlanError> {
        if group.engine_page_tokens == 0 {
            let expected = "a page has a token at least".to_owned();
            return Err(contradiction(
                name,
                At::Group(id),
                "engine_page_tokens",
                0,
                expected,
            ));
        }
        let mut views: Vec<&TensorView> = group.tensors.iter().collect();
        views.sort_by_key(|view| (view.layer, view.role));
        let mut tensors: Vec<SideTensor> = Vec::with_capacity(views.len());
        let mut offset_bytes = 0_u64;
        for view in views {
            let at = At::Tensor(id, view.layer, view.role);
            let tensor = SideTensor::of(name, at, view, offset_bytes)?;
            tensor.check(name, at, ranks, group)?;
            offset_bytes = offset_bytes.checked_add(tensor.page_bytes).ok_or_else(|| {
                let expected = "all tensors of a page have less than 2^64 bytes".to_owned();
                contradiction(name, at, "page_bytes", view.page_bytes, expected)
            })?;
            tensors.push(tensor);
        }
        Ok(Self {
            attention: group.attention,
            window_tokens: group.window_tokens,
            page_tokens: group.engine_page_tokens,
            layers: group.layers,
            tensors,
        })
    }
}

impl SideTensor {
    fn of(name: PlanSide, at: At, view: &TensorView, offset_bytes: u64) -> Result<Self, PlanError> {
        let wrong = |field, value: u64, expected: &str| {
            Err(contradiction(name, at, field, value, expected.to_owned()))
        };
        if view.shape.len() != view.strides.len() {
            return wrong(
                "shape",
                view.shape.len() as u64,
                "it has as many axes as strides",
            );
        }
        let (heads, tokens) = match &view.slices {
            Some(Slices::Heads {
                head_axis,
                token_axis,
                ..
            }) => (Some(*head_axis), Some(*token_axis)),
            Some(Slices::Whole { token_axis }) => (None, Some(*token_axis)),
            Some(Slices::Parts { .. } | Slices::Other) | None => (None, None),
        };
        for (field, axis) in [("head_axis", heads), ("token_axis", tokens)] {
            if let Some(axis) = axis
                && (axis as usize >= view.shape.len() || axis == view.page_axis)
            {
                return wrong(
                    field,
                    u64::from(axis),
                    "it is an axis of the shape beside page_axis",
                );
            }
        }
        if heads.is_some() && heads == tokens {
            return wrong(
                "head_axis",
                u64::from(heads.unwrap_or(0)),
                "token_axis is another axis",
            );
        }
        let mut inside: Vec<(u32, u64, u64, Counts)> = (0_u32..)
            .zip(view.shape.iter().zip(&view.strides))
            .filter(|(axis, _)| *axis != view.page_axis)
            .map(|(axis, (length, stride))| {
                let counts = match Some(axis) {
                    named if named == heads => Counts::Heads,
                    named if named == tokens => Counts::Tokens,
                    _ => Counts::Other,
                };
                (axis, *length, *stride, counts)
            })
            .collect();
        // An axis of one index has any stride, and comes first among those of the same one.
        inside.sort_by_key(|(_, length, stride, _)| (*stride, *length > 1));
        let registered = inside.iter().map(|(axis, length, ..)| (*axis, *length));
        let registered = registered.filter(|(_, length)| *length > 1).collect();
        let bytes = (
            view.page_axis,
            u64::from(view.element_bytes),
            0,
            Counts::Other,
        );
        let mut step_bytes = 1_u64;
        let mut axes: Vec<Axis> = Vec::with_capacity(inside.len() + 1);
        for (_, length, _, counts) in std::iter::once(bytes).chain(inside) {
            match axes.last_mut() {
                Some(last) if last.counts == counts => {
                    last.length = last.length.saturating_mul(length)
                }
                _ => axes.push(Axis {
                    counts,
                    length,
                    step_bytes,
                }),
            }
            let Some(more) = step_bytes.checked_mul(length) else {
                return wrong("shape", length, "a page has less than 2^64 bytes");
            };
            step_bytes = more;
        }
        if step_bytes != view.page_bytes || step_bytes == 0 {
            return wrong(
                "page_bytes",
                view.page_bytes,
                "it is the product of the axes inside a page, and not 0",
            );
        }
        axes.reverse();
        Ok(Self {
            layer: view.layer,
            role: view.role,
            offset_bytes,
            page_bytes: view.page_bytes,
            axes,
            registered,
            slices: view.slices.clone(),
        })
    }

    /// Checks what the tensor says of its slices against its shape and the number of ranks.
    fn check(
        &self,
        name: PlanSide,
        at: At,
        ranks: u16,
        group: &GroupMemory,
    ) -> Result<(), PlanError> {
        let wrong = |field, value: u64, expected: String| {
            Err(contradiction(name, at, field, value, expected))
        };
        let unequal = |field, value: u64| {
            Err(PlanError::Unequal {
                side: name,
                at,
                field,
                value,
                ranks,
            })
        };
        let state = group.attention == Attention::State;
        match &self.slices {
            None | Some(Slices::Other) => Ok(()),
            Some(Slices::Parts { .. }) if !state => {
                wrong("parts", 0, "only state has parts".to_owned())
            }
            Some(Slices::Heads { .. } | Slices::Whole { .. }) if state => wrong(
                "token_axis",
                0,
                "a page of a state has no tokens: name its parts".to_owned(),
            ),
            Some(Slices::Heads { kv_heads, .. }) => {
                let (heads, ranks) = (u64::from(*kv_heads), u64::from(ranks));
                if heads == 0 || ranks == 0 || (heads % ranks != 0 && ranks % heads != 0) {
                    return unequal("kv_heads", heads);
                }
                let (held, wanted) = (self.length(Counts::Heads), (heads / ranks).max(1));
                if held != wanted {
                    let expected = format!(
                        "kv_heads is {heads}, of which each of {ranks} ranks holds {wanted}"
                    );
                    return wrong("shape[head_axis]", held, expected);
                }
                self.check_tokens(name, at, group)
            }
            Some(Slices::Whole { .. }) => self.check_tokens(name, at, group),
            Some(Slices::Parts { parts }) => {
                let mut bytes = 0_u64;
                for part in parts {
                    let StatePart { dim, row_bytes } = *part;
                    if dim == 0 || ranks == 0 || dim % u32::from(ranks) != 0 {
                        return unequal("dim of a part", u64::from(dim));
                    }
                    let held = u64::from(dim / u32::from(ranks)).checked_mul(row_bytes);
                    bytes = held
                        .and_then(|held| bytes.checked_add(held))
                        .unwrap_or(u64::MAX);
                }
                if bytes != self.page_bytes {
                    return wrong(
                        "page_bytes",
                        self.page_bytes,
                        format!("its parts have {bytes} bytes on a rank"),
                    );
                }
                Ok(())
            }
        }
    }

    fn check_tokens(&self, name: PlanSide, at: At, group: &GroupMemory) -> Result<(), PlanError> {
        let (found, wanted) = (
            self.length(Counts::Tokens),
            u64::from(group.engine_page_tokens),
        );
        if found == wanted {
            return Ok(());
        }
        let expected = format!("engine_page_tokens is {wanted}");
        Err(contradiction(
            name,
            at,
            "shape[token_axis]",
            found,
            expected,
        ))
    }

    /// The axes that both sides have alike, outermost first.
    pub(crate) fn others(&self) -> impl Iterator<Item = &Axis> {
        let others = self.axes.iter();
        others.filter(|axis| axis.counts == Counts::Other)
    }

    /// Bytes from one index to the next of the axis that counts this; 0 if there is none.
    pub(crate) fn step(&self, counts: Counts) -> u64 {
        let found = self.axes.iter().find(|axis| axis.counts == counts);
        found.map_or(0, |axis| axis.step_bytes)
    }

    /// Length of the axis that counts this; 1 if there is none.
    pub(crate) fn length(&self, counts: Counts) -> u64 {
        let found = self.axes.iter().find(|axis| axis.counts == counts);
        found.map_or(1, |axis| axis.length)
    }
}

fn contradiction(
    side: PlanSide,
    at: At,
    field: &'static str,
    value: u64,
    expected: String,
) -> PlanError {
    PlanError::Contradiction {
        side,
        at,
        field,
        value,
        expected,
    }
}
