#pragma once
/// @file step_cost.hpp
/// What a step costs by its rows.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"

namespace lookahead {

/// The time of a step as a function of its rows: given as a table, or learnt while decoding, for ranges of the
/// context's size apart. Times are compared with each other only, so their unit does not matter.
///
/// What is learnt lies in classes of rows, up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... rows, each measured by itself. A
/// class is never slower than a larger one. A first measurement that is far too slow is not believed. A slow step moves
/// its class by at most a factor, and all of them by a part of it, since most likely the machine has become slower.
class StepCost {
 public:
  /// Times of a table are below this.
  static constexpr std::uint32_t time_limit = 1U << 24;

  /// Learnt.
  StepCost() = default;

  /// Rows are free: a step takes all that it may.
  [[nodiscard]] static StepCost none() { return StepCost(Kind::none, {}); }

  /// `time[r - 1]` is the time of a step of r rows. No step is given more rows than the table has, unless more are
  /// fixed (see RowOffer), which then cost as its last entry. Throws InvalidArgument for an empty table, a time of 0 or
  /// from `time_limit` on, or one that falls.
  [[nodiscard]] static StepCost given(std::vector<std::uint32_t> time) {
    if (time.empty()) throw InvalidArgument("the table of costs is empty: give the time of a step of one row at least");
    for (std::size_t i = 0; i < time.size(); ++i) {
      const auto refuse = [&](const std::string& why) {
        throw InvalidArgument("the time of " + std::to_string(i + 1) + " rows is " + std::to_string(time[i]) + why);
      };
      if (time[i] == 0 || time[i] >= time_limit)
        refuse(": give a number from 1 to " + std::to_string(time_limit - 1) + ", in any unit");
      if (i > 0 && time[i] < time[i - 1])
        refuse(", less than the " + std::to_string(time[i - 1]) + " of one row less: times must not fall");
    }
    return StepCost(Kind::given, std::move(time));
  }

  [[nodiscard]] bool learns() const noexcept { return kind_ == Kind::learnt; }

  [[nodiscard]] bool free() const noexcept { return kind_ == Kind::none; }

  /// The most rows of a step that it has a time for.
  [[nodiscard]] std::size_t max_rows() const noexcept { return kind_ == Kind::given ? table_.size() : row_limit; }

  /// The time of a step of `rows` rows, at least 1, below `time_limit`. Where nothing is known yet it is a guess from
  /// the nearest classes; see `known`. Preconditions: rows >= 1; if it learns, `use` was called.
  [[nodiscard]] std::uint32_t time(std::size_t rows) const noexcept {
    switch (kind_) {
      case Kind::none:
        return 1;
      case Kind::given:
        return table_[std::min(rows, table_.size()) - 1];
      default:
        return std::max(fitted_[class_of(rows)], 1U);
    }
  }

  /// Nanoseconds for one unit of `time`; 1 where it does not learn.
  [[nodiscard]] double unit() const noexcept { return unit_; }

  /// Goes to the range of a context of `context` tokens. A range that is new starts with what the nearest smaller one
  /// knows, or the nearest larger one.
  void use(std::size_t context) noexcept {
    const std::size_t range = std::min<std::size_t>(std::bit_width(context / 1024), range_count - 1);
    if (!learns() || range == range_) return;
    if (empty(ranges_[range])) ranges_[range] = nearest(range);
    range_ = range;
    fit();
  }

  /// Whether a step of the class of `rows` was ever measured, in this range or the one it started from, and that is
  /// believed.
  [[nodiscard]] bool known(std::size_t rows) const noexcept { return known_[class_of(rows)]; }

  /// Whether a step can have taken so long: more than nothing, at most a day.
  [[nodiscard]] static constexpr bool usable(double nanoseconds) noexcept {
    return nanoseconds > 0 && nanoseconds <= 86400e9;
  }

  /// Takes a measured step of `rows` rows; nothing where the time is not `usable`.
  /// Preconditions: rows >= 1; it learns, and `use` was called.
  void observe(std::size_t rows, double nanoseconds) noexcept {
    if (!usable(nanoseconds)) return;
    Curve& curve = ranges_[range_];
    Measured& own = curve[class_of(rows)];
    if (own.count < 2) {  // the first ones are slow, if anything
      own.time = own.count == 0 ? nanoseconds : std::min(own.time, nanoseconds);
    } else {
      const double off = std::clamp(nanoseconds / own.time, 1 / most_off, most_off) - 1;
      for (Measured& m : curve) m.time *= 1 + load_share * off;
      own.time *= 1 + off / own.count;
    }
    own.count = std::min(own.count + 1, most_count);
    fit();
  }

  /// The classes of rows: `class_end(c)` is the largest number of rows of class c.
  [[nodiscard]] static constexpr std::size_t class_of(std::size_t rows) noexcept {
    rows = std::min(rows, row_limit);
    if (rows <= 2) return rows - 1;
    const auto k = static_cast<std::size_t>(std::bit_width(rows - 1)) - 1;  // 2^k < rows <= 2^(k + 1)
    return 2 * k + (rows > std::size_t{3} << (k - 1) ? 1 : 0);
  }
  [[nodiscard]] static constexpr std::size_t class_end(std::size_t c) noexcept {
    return c < 2 ? c + 1 : c % 2 == 0 ? std::size_t{3} << (c / 2 - 1) : std::size_t{2} << (c / 2);
  }
  static constexpr std::size_t row_limit = std::size_t{1} << 20, class_count = 40;

 private:
  enum class Kind : std::uint8_t { learnt, given, none };

  struct Measured {
    double time = 0;  ///< nanoseconds
    int count = 0;
  };
  using Curve = std::array<Measured, class_count>;

  static constexpr std::size_t range_count = 12;  ///< of the context's size: below 1,024 tokens, 2,048, ...
  static constexpr int most_count = 24;           ///< what counts after so many steps are the newest
  static constexpr double most_off = 1.25;        ///< what a step may be off by; one that is more is disturbed
  static constexpr double doubtful = 1.25;   ///< as often what was to be expected, a first measurement is not believed
  static constexpr double load_share = 0.2;  ///< of what a step is off, that is taken to be the machine's load
  static constexpr double first_slope = 1.0 / 16;  ///< of a one-row step, for a row more, until there is a measurement

  StepCost(Kind kind, std::vector<std::uint32_t> table) : kind_(kind), table_(std::move(table)) {}

  [[nodiscard]] const Curve& here() const noexcept { return ranges_[range_]; }

  static bool empty(const Curve& curve) noexcept {
    return std::ranges::all_of(curve, [](const Measured& m) { return m.count == 0; });
  }

  /// The curve of the nearest range that has one, to start with: it counts little against what will be measured.
  [[nodiscard]] Curve nearest(std::size_t range) const noexcept {
    Curve curve{};
    for (std::size_t r = 0; r < range_count; ++r)
      if (!empty(ranges_[r]) && (r < range || empty(curve))) curve = ranges_[r];
    for (Measured& m : curve) m.count = std::min(m.count, 2);
    return curve;
  }

  /// The curve through what was measured here.
  void fit() noexcept {
    // A first measurement may be far too slow: memory is touched, kernels are loaded, graphs are built. It counts where
    // it is near the line through what is known of fewer rows.
    known_ = {};
    std::size_t first = class_count, a = 0;
    double slope = 0;
    for (std::size_t c = 0; c < class_count; ++c) {
      const Measured& m = here()[c];
      if (m.count == 0) continue;
      if (first == class_count) {
        first = c;
        slope = first_slope * m.time;
      } else {
        if (m.count == 1 && m.time > doubtful * (here()[a].time + slope * rows_between(a, c))) continue;
        slope = std::max(0.0, (m.time - here()[a].time) / rows_between(a, c));
      }
      known_[c] = true;
      a = c;
    }
    if (first == class_count) return;
    // Fewer rows take no longer than more: a step that was slower was disturbed.
    std::array<double, class_count> time;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t c = class_count; c-- > 0;) {
      if (known_[c]) least = std::min(least, here()[c].time);
      time[c] = least;
    }
    unit_ = time[first] / one_row;
    // Lines between the classes that count, and beyond the last one.
    a = first;
    slope = first_slope * time[a];
    for (std::size_t c = a + 1; c < class_count; ++c) {
      if (known_[c]) {
        const double rise = (time[c] - time[a]) / rows_between(a, c);
        for (std::size_t k = a + 1; k < c; ++k) time[k] = time[a] + rise * rows_between(a, k);
        slope = rise;
        a = c;
      } else if (time[c] == std::numeric_limits<double>::infinity()) {
        time[c] = time[a] + slope * rows_between(a, c);
      }
    }
    for (std::size_t c = 0; c < class_count; ++c)
      fitted_[c] = static_cast<std::uint32_t>(std::clamp(time[c] / unit_, 1.0, double{time_limit - 1}));
  }

  [[nodiscard]] static double rows_between(std::size_t a, std::size_t b) noexcept {
    return static_cast<double>(class_end(b) - class_end(a));
  }

  static constexpr double one_row = 1 << 14;  ///< `time` of the fastest step

  Kind kind_ = Kind::learnt;
  std::vector<std::uint32_t> table_;
  std::array<Curve, range_count> ranges_{};
  std::array<std::uint32_t, class_count> fitted_{};
  std::array<bool, class_count> known_{};  ///< the classes that `fitted_` goes through
  std::size_t range_ = 0;
  double unit_ = 1;
};

}  // namespace lookahead
