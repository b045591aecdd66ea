//! Optimizers whose whole state can be saved, learning-rate schedules, EMA.
