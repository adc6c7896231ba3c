//! A small, safe evaluator of arithmetic over whole numbers: + - * / and parentheses, in exact fractions. Text comes from models, so
//! nothing here can panic, overflow or recurse without bound. Not a calculator: no variables, no functions, no signs before numbers.

/// An exact fraction in lowest terms, denominator above zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ratio {
    numerator: i64,
    denominator: i64,
}

impl Ratio {
    /// `n` / 1.
    pub(super) fn whole(n: i64) -> Self {
        Self { numerator: n, denominator: 1 }
    }

    fn new(numerator: i64, denominator: i64) -> Option<Self> {
        let divisor = gcd(numerator.checked_abs()?, denominator.checked_abs()?);
        if denominator == 0 {
            return None;
        }
        let (numerator, denominator) = (numerator / divisor, denominator / divisor);
        Some(if denominator < 0 {
            Self { numerator: -numerator, denominator: -denominator }
        } else {
            Self { numerator, denominator }
        })
    }

    fn apply(self, operator: u8, other: Self) -> Option<Self> {
        let (a, b, c, d) = (self.numerator, self.denominator, other.numerator, other.denominator);
        match operator {
            b'+' => Self::new(a.checked_mul(d)?.checked_add(c.checked_mul(b)?)?, b.checked_mul(d)?),
            b'-' => Self::new(a.checked_mul(d)?.checked_sub(c.checked_mul(b)?)?, b.checked_mul(d)?),
            b'*' => Self::new(a.checked_mul(c)?, b.checked_mul(d)?),
            b'/' => Self::new(a.checked_mul(d)?, b.checked_mul(c)?),
            _ => None,
        }
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

/// What an expression comes to.
#[derive(Debug, PartialEq)]
pub(super) struct Evaluated {
    pub value: Ratio,
    /// Every number that stands in it, in order.
    pub numbers: Vec<i64>,
}

/// The longest expression read, in bytes; which bounds the depth of its parentheses too.
const LENGTH_MAX: usize = 256;

/// The value of `text`; None where it is not an expression, divides by zero, or leaves the range of an i64.
pub(super) fn evaluate(text: &str) -> Option<Evaluated> {
    if text.len() > LENGTH_MAX {
        return None;
    }
    let mut parser = Parser { text: text.as_bytes(), at: 0, numbers: Vec::new() };
    let value = parser.sum()?;
    (parser.peek().is_none()).then_some(Evaluated { value, numbers: parser.numbers })
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    numbers: Vec<i64>,
}

impl Parser<'_> {
    /// The next byte that is not a space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    /// product (('+' | '-') product)*
    fn sum(&mut self) -> Option<Ratio> {
        let mut value = self.product()?;
        while let Some(operator @ (b'+' | b'-')) = self.peek() {
            self.at += 1;
            value = value.apply(operator, self.product()?)?;
        }
        Some(value)
    }

    /// atom (('*' | '/') atom)*
    fn product(&mut self) -> Option<Ratio> {
        let mut value = self.atom()?;
        while let Some(operator @ (b'*' | b'/')) = self.peek() {
            self.at += 1;
            value = value.apply(operator, self.atom()?)?;
        }
        Some(value)
    }

    /// number | '(' sum ')'
    fn atom(&mut self) -> Option<Ratio> {
        match self.peek()? {
            b'(' => {
                self.at += 1;
                let value = self.sum()?;
                (self.peek()? == b')').then(|| self.at += 1)?;
                Some(value)
            }
            b'0'..=b'9' => {
                let start = self.at;
                while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
                    self.at += 1;
                }
                let number = std::str::from_utf8(&self.text[start..self.at]).ok()?.parse().ok()?;
                self.numbers.push(number);
                Some(Ratio::whole(number))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(text: &str) -> Option<(i64, i64)> {
        evaluate(text).map(|e| (e.value.numerator, e.value.denominator))
    }

    #[test]
    fn arithmetic_is_exact_and_binds_as_usual() {
        assert_eq!(value("2+3*4"), Some((14, 1)));
        assert_eq!(value("(2+3)*4"), Some((20, 1)));
        assert_eq!(value("9-3-2"), Some((4, 1)));
        assert_eq!(value("8/(3-8/3)"), Some((24, 1)));
        assert_eq!(value("1/3-1/2"), Some((-1, 6)));
        assert_eq!(evaluate("7*(8+1)").unwrap().numbers, [7, 8, 1]);
    }

    #[test]
    fn what_is_no_expression_has_no_value() {
        for text in
            ["", "1+", "(1", "1)", "1 2", "-1", "a", "1/0", "1/(2-2)", "9223372036854775807+1", "99999999999999999999"]
        {
            assert_eq!(value(text), None, "{text}");
        }
        assert_eq!(value(&"(".repeat(100_000)), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9+*/() -]{0,300}|.{0,60}") {
            let _ = evaluate(&text);
        }
    }
}
