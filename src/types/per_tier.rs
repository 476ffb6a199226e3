//! A value for each of some tiers.

use super::TierId;

/// A value for each of some tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerTier<T>([Option<T>; TierId::ALL.len()]);

impl<T> Default for PerTier<T> {
    fn default() -> Self {
        Self(TierId::ALL.map(|_| None))
    }
}

impl<T> PerTier<T> {
    /// A value for host memory only.
    pub const fn host(value: T) -> Self {
        Self([None, Some(value), None, None])
    }

    /// The value of a tier.
    pub fn get(&self, tier: TierId) -> Option<&T> {
        self.0[tier as usize].as_ref()
    }

    /// The value of a tier, mutable.
    pub fn get_mut(&mut self, tier: TierId) -> Option<&mut T> {
        self.0[tier as usize].as_mut()
    }

    /// Sets the value of a tier. Returns the one before.
    pub fn insert(&mut self, tier: TierId, value: T) -> Option<T> {
        self.0[tier as usize].replace(value)
    }

    /// The tiers that have a value, fastest first.
    pub fn tiers(&self) -> impl Iterator<Item = TierId> {
        self.iter().map(|(tier, _)| tier)
    }

    /// The values, fastest tier first.
    pub fn iter(&self) -> impl Iterator<Item = (TierId, &T)> {
        let tiers = TierId::ALL.into_iter().zip(&self.0);
        tiers.filter_map(|(tier, value)| Some((tier, value.as_ref()?)))
    }

    /// The values, fastest tier first, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (TierId, &mut T)> {
        let tiers = TierId::ALL.into_iter().zip(&mut self.0);
        tiers.filter_map(|(tier, value)| Some((tier, value.as_mut()?)))
    }
}

impl<T> FromIterator<(TierId, T)> for PerTier<T> {
    fn from_iter<I: IntoIterator<Item = (TierId, T)>>(values: I) -> Self {
        let mut all = Self::default();
        for (tier, value) in values {
            all.insert(tier, value);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_tier_and_listed_fastest_first() {
        let mut values: PerTier<u8> = [(TierId::Disk, 3), (TierId::Host, 2)].into_iter().collect();
        assert_eq!(
            (values.get(TierId::Host), values.get(TierId::Remote)),
            (Some(&2), None)
        );
        assert_eq!(values.insert(TierId::Disk, 4), Some(3));
        values.iter_mut().for_each(|(_, value)| *value += 10);
        let all: Vec<(TierId, u8)> = values.iter().map(|(tier, value)| (tier, *value)).collect();
        assert_eq!(all, [(TierId::Host, 12), (TierId::Disk, 14)]);
        assert_eq!(PerTier::host(1).tiers().collect::<Vec<_>>(), [TierId::Host]);
    }
}
