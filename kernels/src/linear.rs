//! Matrix products with weights `[in, out]`. One row alone is padded to two, so that its bits are those it has in company.

use crate::Tensor;

/// `out[T, O] = x[T, I] · w[I, O]`.
pub fn forward(x: &Tensor, w: &Tensor, out: &mut Tensor) {
    todo!()
}

/// `dx[T, I] = d_out[T, O] · wᵀ` (overwritten).
pub fn backward_input(d_out: &Tensor, w: &Tensor, dx: &mut Tensor) {
    todo!()
}

/// `dw[I, O] += xᵀ · d_out`.
pub fn backward_weight(x: &Tensor, d_out: &Tensor, dw: &mut Tensor) {
    todo!()
}
