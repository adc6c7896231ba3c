//! How things fail: a class that says whose fault it is, a message that says what happened, a hint that says what to do.

use std::fmt;

/// Whose failure it is. The class decides the exit code, and whether a round is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Anything without a better name. Exit 1.
    Other,
    /// A wrong command line, or a file of the person's that cannot be used. Exit 2.
    Usage,
    /// A budget or limit was reached. Exit 3.
    Budget,
    /// Something that must not change has changed. Exit 4.
    Integrity,
    /// The candidate is at fault: it diverged, gave NaN, or cannot run. Exit 5.
    Candidate,
    /// Memory, disk, device, network. Costs no round. Exit 6.
    Infrastructure,
    /// The proposer is at fault: no answer, or none that can be used. Exit 1.
    Agent,
    /// Interrupted from outside; state is saved. Exit 130.
    Interrupted,
    /// Terminated from outside; state is saved. Exit 143.
    Terminated,
}

impl Class {
    /// The process's exit code for this class.
    pub fn exit_code(self) -> u8 {
        match self {
            Class::Other | Class::Agent => 1,
            Class::Usage => 2,
            Class::Budget => 3,
            Class::Integrity => 4,
            Class::Candidate => 5,
            Class::Infrastructure => 6,
            Class::Interrupted => 130,
            Class::Terminated => 143,
        }
    }

    /// Whose failure a run's exit code says it was. Whatever no class claims is the candidate's: what the run was given to run
    /// does not work, usage and config errors included.
    pub fn of_run(code: i32) -> Self {
        let classes = [Class::Budget, Class::Integrity, Class::Infrastructure, Class::Interrupted, Class::Terminated];
        classes.into_iter().find(|class| i32::from(class.exit_code()) == code).unwrap_or(Class::Candidate)
    }
}

/// An error for people: class, message, hint, and where in which file.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// Whose failure it is.
    pub class: Class,
    /// What happened: one sentence, ends with a period.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// `file:line:column`, where one is known.
    pub at: Option<String>,
}

/// The result of everything that can fail in a person's sight.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure with a message alone.
    pub fn new(class: Class, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), hint: None, at: None }
    }
    /// Adds what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// Adds where.
    #[must_use]
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.at = Some(place.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        write!(f, "{}", self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Adds a class and a message to errors from below, keeping their own text.
pub trait Context<T> {
    /// Fails with `message`, a colon, the error's own text and a period.
    fn context(self, class: Class, message: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, class: Class, message: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Failure::new(class, format!("{}: {}.", message(), e.to_string().trim_end_matches('.'))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_the_published_ones_and_read_back() {
        let published = [(3, Class::Budget), (4, Class::Integrity), (5, Class::Candidate), (6, Class::Infrastructure)];
        for (code, class) in published.into_iter().chain([(130, Class::Interrupted), (143, Class::Terminated)]) {
            assert_eq!((class.exit_code(), Class::of_run(code.into())), (code, class));
        }
        assert_eq!(
            (Class::Usage.exit_code(), Class::of_run(2), Class::of_run(101)),
            (2, Class::Candidate, Class::Candidate)
        );
    }

    #[test]
    fn a_failure_reads_place_message_hint() {
        let failure = Failure::new(Class::Usage, "Unknown key `a`.").hint("did you mean `b`?").at("goal.yaml:3:1");
        assert_eq!(failure.to_string(), "goal.yaml:3:1: Unknown key `a`.\n\nhint: did you mean `b`?");
        let error: std::result::Result<(), _> = Err("disk full");
        assert_eq!(
            error.context(Class::Other, || "Cannot write".into()).unwrap_err().message,
            "Cannot write: disk full."
        );
    }
}
