//! Matrix products with weights `[in, out]`, in the weight's dtype.

use crate::{
    Tensor,
    matrix::{Matrix, Write, multiply_in},
};

/// `out[T, O] = x[T, I] · w[I, O]`.
pub fn forward(x: &Tensor, w: &Tensor, out: &mut Tensor) {
    out.resize(&[x.rows(), w.cols()]);
    let weights = matrix(w).with_pairs(w.pairs_of(0));
    multiply_in(w.dtype(), matrix(x), weights, Write::Over, out.data_mut(), w.cols());
}

/// `dx[T, I] = d_out[T, O] · wᵀ` (overwritten).
pub fn backward_input(d_out: &Tensor, w: &Tensor, dx: &mut Tensor) {
    dx.resize(&[d_out.rows(), w.rows()]);
    multiply_in(w.dtype(), matrix(d_out), matrix(w).transposed(), Write::Over, dx.data_mut(), w.rows());
}

/// `dx[T, I] += d_out[T, O] · wᵀ`: where several projections read one input.
pub fn backward_input_add(d_out: &Tensor, w: &Tensor, dx: &mut Tensor) {
    multiply_in(w.dtype(), matrix(d_out), matrix(w).transposed(), Write::Add, dx.data_mut(), w.rows());
}

/// `dw[I, O] += xᵀ · d_out`.
pub fn backward_weight(x: &Tensor, d_out: &Tensor, dw: &mut Tensor) {
    multiply_in(dw.dtype(), matrix(x).transposed(), matrix(d_out), Write::Add, dw.data_mut(), d_out.cols());
}

fn matrix(t: &Tensor) -> Matrix<'_> {
    Matrix::new(t.data(), t.rows(), t.cols())
}

/// The same, one element at a time.
#[cfg(test)]
pub(crate) mod plain {
    use crate::Tensor;

    /// `out[T, O] = x[T, I] · w[I, O]`.
    pub fn forward(x: &Tensor, w: &Tensor, out: &mut Tensor) {
        out.resize(&[x.rows(), w.cols()]);
        for t in 0..x.rows() {
            for o in 0..w.cols() {
                out.row_mut(t)[o] = (0..w.rows()).map(|i| x.row(t)[i] * w.row(i)[o]).sum();
            }
        }
    }

    /// `dx[T, I] = d_out[T, O] · wᵀ` (overwritten).
    pub fn backward_input(d_out: &Tensor, w: &Tensor, dx: &mut Tensor) {
        dx.resize(&[d_out.rows(), w.rows()]);
        for t in 0..d_out.rows() {
            for i in 0..w.rows() {
                dx.row_mut(t)[i] = (0..w.cols()).map(|o| d_out.row(t)[o] * w.row(i)[o]).sum();
            }
        }
    }

    /// `dw[I, O] += xᵀ · d_out`.
    pub fn backward_weight(x: &Tensor, d_out: &Tensor, dw: &mut Tensor) {
        for t in 0..x.rows() {
            for i in 0..x.cols() {
                for o in 0..d_out.cols() {
                    dw.row_mut(i)[o] += x.row(t)[i] * d_out.row(t)[o];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{self, assert_close, random};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn equals_its_twin(t in 1usize..30, i in 1usize..40, o in 1usize..40) {
            let (x, w, d_out) = (random(1, &[t, i]), random(2, &[i, o]), random(3, &[t, o]));
            let (mut fast, mut slow) = (Tensor::default(), Tensor::default());
            forward(&x, &w, &mut fast);
            plain::forward(&x, &w, &mut slow);
            assert_close(fast.data(), slow.data(), 1e-5, 1e-5);
            backward_input(&d_out, &w, &mut fast);
            plain::backward_input(&d_out, &w, &mut slow);
            assert_close(fast.data(), slow.data(), 1e-5, 1e-5);
            backward_input_add(&d_out, &w, &mut fast);
            let twice: Vec<f32> = slow.data().iter().map(|x| 2.0 * x).collect();
            assert_close(fast.data(), &twice, 1e-5, 1e-5);
            let (mut fast, mut slow) = (random(4, &[i, o]), random(4, &[i, o]));
            backward_weight(&x, &d_out, &mut fast);
            plain::backward_weight(&x, &d_out, &mut slow);
            assert_close(fast.data(), slow.data(), 1e-5, 1e-5);
        }
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for (t, i, o) in [(1, 5, 3), (7, 16, 1), (33, 10, 20)] {
            let (x, w, d_out) = (random(1, &[t, i]), random(2, &[i, o]), random(3, &[t, o]));
            let (mut dx, mut dw) = (Tensor::default(), Tensor::zeros(&[i, o]));
            backward_input(&d_out, &w, &mut dx);
            backward_weight(&x, &d_out, &mut dw);
            let found = oracle::autograd(&[&x, &w], &[&d_out], |v| Ok(vec![v[0].matmul(&v[1])?]));
            assert_close(dx.data(), &found.gradients[0], 1e-5, 1e-5);
            assert_close(dw.data(), &found.gradients[1], 1e-5, 1e-5);
            oracle::assert_slopes(&[&x, &w], &[&d_out], &[&dx, &dw], 1e-2, 1e-3, |v| {
                let mut out = Tensor::default();
                forward(&v[0], &v[1], &mut out);
                vec![out]
            });
        }
    }

    #[test]
    fn a_row_has_its_bits_in_any_company() {
        let (x, w) = (random(1, &[64, 96]), random(2, &[96, 40]));
        let mut whole = Tensor::default();
        forward(&x, &w, &mut whole);
        for rows in [1, 2, 3, 17, 64] {
            let part = Tensor::from_vec(x.data()[..rows * 96].to_vec(), &[rows, 96]);
            let mut out = Tensor::default();
            forward(&part, &w, &mut out);
            assert_eq!(out.data(), &whole.data()[..rows * 40], "{rows} rows");
        }
    }
}
