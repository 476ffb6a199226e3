//! Computation time of an engine.

use std::time::Duration;

use serde::Deserialize;

use kvferry_types::Time;

/// How long the prefill of a prompt takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Prefill {
    /// Prefill takes no time.
    Instant,
    /// Tokens per second, at least 1.
    Rate(u64),
    /// A polynomial in the number T of new tokens: a x T^2 + b x T + c milliseconds; zero for no tokens.
    Quadratic {
        /// Milliseconds for each squared token: attention.
        a: f64,
        /// Milliseconds for each token.
        b: f64,
        /// Milliseconds for each prompt.
        c: f64,
    },
}

impl Prefill {
    /// Prefill time of `tokens` new tokens, rounded up to nanoseconds.
    pub fn span(&self, tokens: u64) -> Duration {
        match *self {
            _ if tokens == 0 => Duration::ZERO,
            Self::Instant => Duration::ZERO,
            Self::Rate(per_s) => {
                let nanos = (u128::from(tokens) * 1_000_000_000).div_ceil(u128::from(per_s.max(1)));
                Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
            }
            Self::Quadratic { a, b, c } => {
                let tokens = tokens as f64;
                let ms = (a * tokens + b) * tokens + c;
                Duration::from_nanos((ms * 1e6).ceil() as u64)
            }
        }
    }
}

/// Computation time of an engine, read from a TOML file:
///
/// ```toml
/// decode_ms = 26.3        # for each token of an answer; 0 when left out
///
/// [prefill_ms]            # a x T^2 + b x T + c for T new tokens
/// a = 4.209989e-07
/// b = 1.518344e-02
/// c = 16.50142
/// ```
///
/// The figures of the example are those of NVIDIA Dynamo's simulator (`lib/mocker`, its built-in engine timing); the
/// decoding figure is the one for memory that is half full.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Formula {
    /// Prefill time of a prompt.
    pub prefill_ms: Polynomial,
    /// Milliseconds for each token of an answer. Default: 0.
    #[serde(default)]
    pub decode_ms: f64,
}

/// Factors of [`Prefill::Quadratic`].
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Polynomial {
    /// Factor of T^2 in milliseconds. Default: 0.
    #[serde(default)]
    pub a: f64,
    /// Factor of T in milliseconds. Default: 0.
    #[serde(default)]
    pub b: f64,
    /// Constant part in milliseconds. Default: 0.
    #[serde(default)]
    pub c: f64,
}

impl Formula {
    /// Prefill time, and decoding time of a token.
    ///
    /// # Errors
    ///
    /// The name of a factor that is negative or not finite.
    pub fn parts(self) -> Result<(Prefill, Duration), &'static str> {
        let Polynomial { a, b, c } = self.prefill_ms;
        let named = [
            ("prefill_ms.a", a),
            ("prefill_ms.b", b),
            ("prefill_ms.c", c),
            ("decode_ms", self.decode_ms),
        ];
        match named
            .iter()
            .find(|(_, value)| !value.is_finite() || *value < 0.0)
        {
            Some((name, _)) => Err(name),
            None => {
                let decode = Duration::from_nanos((self.decode_ms * 1e6).round() as u64);
                Ok((Prefill::Quadratic { a, b, c }, decode))
            }
        }
    }
}

/// The device that computes prompts: one after another if `serial`, or all at once.
#[derive(Debug)]
pub(super) struct TimedDevice {
    prefill: Prefill,
    serial: bool,
    free_at: Time,
    busy: Duration,
}

impl TimedDevice {
    pub(super) fn new(prefill: Prefill, serial: bool) -> Self {
        Self {
            prefill,
            serial,
            free_at: Time(0),
            busy: Duration::ZERO,
        }
    }

    /// Queues the prefill of `tokens` tokens. Returns when the prefill ends.
    pub(super) fn compute(&mut self, now: Time, tokens: u64) -> Time {
        let span = self.prefill.span(tokens);
        self.busy += span;
        if !self.serial {
            return now + span;
        }
        self.free_at = self.free_at.max(now) + span;
        self.free_at
    }

    /// Total time of all prefills.
    pub(super) fn busy(&self) -> Duration {
        self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOCKER: Prefill = Prefill::Quadratic {
        a: 4.209_989e-07,
        b: 1.518_344e-02,
        c: 16.501_42,
    };

    #[test]
    fn prefill_takes_the_time_of_the_formula() {
        assert_eq!(Prefill::Instant.span(1 << 40), Duration::ZERO);
        assert_eq!(Prefill::Rate(10_000).span(5), Duration::from_micros(500));
        assert_eq!(Prefill::Rate(3).span(1), Duration::from_nanos(333_333_334));
        assert_eq!(
            Prefill::Rate(1).span(u64::MAX),
            Duration::from_nanos(u64::MAX)
        );
        // 1.765807 + 31.095685 + 16.50142 ms
        let span = MOCKER.span(2_048).as_micros();
        assert_eq!(span, 49_362);
        assert_eq!(MOCKER.span(0), Duration::ZERO);
    }

    #[test]
    fn a_serial_device_computes_one_prompt_after_another() {
        let ms = |ms: u64| Time(ms * 1_000_000);
        let mut serial = TimedDevice::new(Prefill::Rate(1_000), true);
        assert_eq!(serial.compute(ms(0), 10), ms(10));
        assert_eq!(serial.compute(ms(4), 5), ms(15));
        assert_eq!(serial.compute(ms(20), 5), ms(25));
        assert_eq!(serial.busy(), Duration::from_millis(20));
        let mut parallel = TimedDevice::new(Prefill::Rate(1_000), false);
        assert_eq!(parallel.compute(ms(0), 10), ms(10));
        assert_eq!(parallel.compute(ms(4), 5), ms(9));
    }

    #[test]
    fn a_formula_names_the_invalid_factor() {
        let formula = |b, decode_ms| Formula {
            prefill_ms: Polynomial { a: 0.0, b, c: 0.0 },
            decode_ms,
        };
        assert_eq!(formula(-1.0, 0.0).parts(), Err("prefill_ms.b"));
        assert_eq!(formula(1.0, f64::NAN).parts(), Err("decode_ms"));
        let (prefill, decode) = formula(2.0, 26.5).parts().expect("possible");
        assert_eq!(prefill.span(3), Duration::from_millis(6));
        assert_eq!(decode, Duration::from_micros(26_500));
    }
}
