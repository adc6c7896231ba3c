//! Memory lent for the length of a call. What an operation needs between two of its steps and nobody else, kept a thread so that the
//! next call finds it warm; results that outlive a call belong in the operation's own structs.

use std::cell::RefCell;

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends `work` a slice of `len` floats with unspecified contents. Calls may nest.
pub(crate) fn with<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = FREE.with(|free| free.borrow_mut().pop()).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = work(&mut buffer[..len]);
    FREE.with(|free| free.borrow_mut().push(buffer));
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
