//! Goals, proposers, branches, the campaign, the judge and the review queue.
