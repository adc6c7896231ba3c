//! Forests from any bytes, as in the fuzz target of the same name.

#[path = "../fuzz/any_forest.rs"]
mod any_forest;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_bytes_make_a_forest_or_an_error_that_names_the_fault(
        first in prop_oneof![4 => Just(0u8), 1 => any::<u8>()],
        segments in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>()), 0..12),
    ) {
        let fields = segments.into_iter().flat_map(|(start, len, parent, uses)| [start, len, parent, uses]);
        any_forest::check(&std::iter::once(first).chain(fields).collect::<Vec<_>>());
    }
}
