//! The short lists in CLC messages.

use core::fmt;

/// Up to [`List::MAX`] items, in the order of the message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct List<T> {
    /// The items, then `None` up to the end.
    items: [Option<T>; 8],
}

impl<T: Copy> List<T> {
    /// Most items that any list of a CLC message has.
    pub const MAX: usize = 8;

    /// A list without items.
    pub const fn new() -> List<T> {
        List { items: [None; 8] }
    }

    /// A list of `items`; `None` if they are more than [`List::MAX`].
    pub fn from_slice(items: &[T]) -> Option<List<T>> {
        let mut list = List::new();
        for (place, item) in list.items.get_mut(..items.len())?.iter_mut().zip(items) {
            *place = Some(*item);
        }
        Some(list)
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.first().is_none()
    }

    /// The first item.
    pub fn first(&self) -> Option<T> {
        self.iter().next()
    }

    /// The items in order.
    pub fn iter(&self) -> impl Iterator<Item = T> {
        self.items.iter().map_while(|item| *item)
    }

    /// Reads `count` items with `read`; `None` if there are more than [`List::MAX`].
    pub(super) fn read<E>(
        count: u8,
        mut read: impl FnMut() -> Result<T, E>,
    ) -> Option<Result<List<T>, E>> {
        let mut list = List::new();
        for place in list.items.get_mut(..usize::from(count))? {
            match read() {
                Ok(item) => *place = Some(item),
                Err(e) => return Some(Err(e)),
            }
        }
        Some(Ok(list))
    }

    /// Number of items as the messages carry it.
    pub(super) fn count(&self) -> u8 {
        self.iter().fold(0, |count, _| count + 1)
    }
}

impl<T: Copy> Default for List<T> {
    fn default() -> List<T> {
        List::new()
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_up_to_eight() {
        assert!(List::<u8>::new().is_empty());
        let list = List::from_slice(&[3, 1, 2]).unwrap();
        assert_eq!((list.len(), list.count(), list.first()), (3, 3, Some(3)));
        assert_eq!(list.iter().collect::<Vec<_>>(), [3, 1, 2]);
        assert_eq!(format!("{list:?}"), "[3, 1, 2]");
        assert_eq!(List::from_slice(&[0; 8]).unwrap().len(), 8);
        assert_eq!(List::from_slice(&[0; 9]), None);
    }
}
