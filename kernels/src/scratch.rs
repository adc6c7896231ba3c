//! Memory lent for the length of a call. What an operation needs between two of its steps and nobody else, kept a thread so that the
//! next call finds it warm; results that outlive a call belong in the operation's own structs.

use std::cell::RefCell;

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends `work` a slice of `len` floats with unspecified contents. Calls may nest.
pub(crate) fn with<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = FREE.with_borrow_mut(|free| {
        // The least that is enough; else the greatest grows, so that few buffers are ever large.
        let fits = free.iter().enumerate().filter(|(_, b)| b.len() >= len).min_by_key(|(_, b)| b.len());
        let best = fits.or_else(|| free.iter().enumerate().max_by_key(|(_, b)| b.len()));
        best.map(|(i, _)| i).map_or_else(Vec::new, |i| free.swap_remove(i))
    });
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = work(&mut buffer[..len]);
    FREE.with_borrow_mut(|free| free.push(buffer));
    result
}

#[cfg(test)]
mod tests {
    #[test]
    fn nested_loans_do_not_overlap() {
        super::with(3, |a| {
            a.fill(1.0);
            super::with(5, |b| b.fill(2.0));
            assert_eq!(a, [1.0; 3]);
        });
        super::with(4, |a| assert_eq!(a.len(), 4));
    }
}
