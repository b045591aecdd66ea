//! Trainings of tiny models.
