#pragma once
/// @file window_switch.hpp
/// Whether the window pays for its rows.

#include <cstddef>

#include "lookahead/step_cost.hpp"
#include "lookahead/step_report.hpp"

namespace lookahead {

/// Runs a window only while it pays: while the tokens that came by it are worth more time, at the present rate of
/// tokens, than the rows that it alone has in the trees. It begins without, and tries a window now and then; trials
/// that fail take at most 1% of the time. Where rows are free, the window is always on.
class WindowSwitch {
 public:
  /// Whether the next step should have a window.
  [[nodiscard]] bool on(const StepCost& cost) const noexcept { return on_ || cost.free(); }

  /// Takes the report of a step. `window_rows`: those that a window has at most. Precondition: a `cost` that learns is
  /// in the range of the step's context. O(depths).
  template <int Depths>
  void observe(const StepReport<Depths>& report, std::size_t window_rows, const StepCost& cost) noexcept {
    if (cost.free() || report.tokens == 0) return;
    int own = 0, got = 0;
    for (int d = 0; d < Depths; ++d) {
      own += report.drafted[static_cast<int>(Origin::window_row)][d];
      got += report.accepted[static_cast<int>(Origin::window_row)][d] +
             report.accepted[static_cast<int>(Origin::window)][d];
    }
    const auto rows = static_cast<std::size_t>(report.rows);
    const double time = cost.time(rows);
    fade(time_, time);
    fade(tokens_, report.tokens);
    ++steps_;
    if (on_) {
      fade(extra_, time - cost.time(rows - static_cast<std::size_t>(own)));
      fade(gain_, got);
      if (steps_ >= trial && gain_ * time_ < extra_ * tokens_) turn(false);
    } else {
      allowance_ += trial_share * time;
      if (steps_ >= trial && allowance_ >= trial * (cost.time(rows + window_rows) - time)) turn(true);
    }
  }

 private:
  static constexpr int trial = 24;             ///< steps, in the first of which a window has no n-grams yet
  static constexpr double trial_share = 0.01;  ///< of the time
  static constexpr double fading = 1.0 / 16;   ///< what a step takes of the sums before it

  static void fade(double& sum, double value) noexcept { sum += value - fading * sum; }

  void turn(bool on) noexcept {
    on_ = on;
    steps_ = 0;
    extra_ = gain_ = allowance_ = 0;
  }

  bool on_ = false;
  int steps_ = 0;
  double time_ = 0, tokens_ = 0, extra_ = 0, gain_ = 0, allowance_ = 0;
};

}  // namespace lookahead
