#pragma once
/// @file batch_controller.hpp
/// How many rows a step gets: as many as pay.

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "lookahead/row_offer.hpp"
#include "lookahead/step_cost.hpp"

namespace lookahead {

/// What a batched step must not exceed, over all sequences.
struct BatchLimits {
  std::size_t rows = StepCost::row_limit;
  std::size_t logit_rows = StepCost::row_limit;
  double time = std::numeric_limits<double>::infinity();  ///< in the unit of the given table; learnt: nanoseconds
};

/// Chooses the number of rows R that gives the most tokens in a unit of time, (expected tokens) / T(R), and which
/// sequences of a batch get them: of all rows that the sequences offer, those that are expected to yield most. One
/// sequence is a batch of one. When no row pays, the sequences get the rows that are fixed: a plain step.
///
/// Where the cost is learnt, now and then a step gets another number of rows near the best one, to measure it. What
/// such steps lose in tokens is at most half a per cent of the time. With a given cost the choice depends on the offers
/// alone.
class BatchController {
 public:
  /// `sequences` and `rows` (over all sequences): what `choose` will not allocate for.
  explicit BatchController(StepCost cost = {}, std::size_t sequences = 0, std::size_t rows = 0)
      : cost_(std::move(cost)) {
    heads_.reserve(sequences);
    order_.reserve(rows);
  }

  /// Writes how many rows of its tree each sequence keeps, fixed ones included, and returns the sum. Fixed rows are
  /// kept whatever the limits say. `context` is the size of the largest context. Precondition: rows.size() ==
  /// offers.size() > 0. O(offered rows * log(sequences)); allocates only where a batch offers more than any before it.
  std::size_t choose(std::span<const RowOffer> offers, std::span<std::int32_t> rows, std::size_t context = 0,
                     const BatchLimits& limits = {}) {
    assert(!offers.empty() && rows.size() == offers.size());
    cost_.use(context);
    ++step_;
    Point now{0, 0};
    std::size_t logit_rows = 0, offered = 0;
    for (std::size_t i = 0; i < offers.size(); ++i) {
      rows[i] = offers[i].fixed;
      now.rows += static_cast<std::size_t>(offers[i].fixed);
      now.value += offers[i].expected;
      logit_rows += static_cast<std::size_t>(offers[i].fixed_logits);
      offered += offers[i].reach.size();
    }
    if (now.rows == 0) return 0;
    const std::size_t fixed = now.rows;
    const std::size_t logits_left = limits.logit_rows - std::min(limits.logit_rows, logit_rows);
    const std::size_t most =
        std::min({limits.rows, cost_.max_rows(), fixed + offered, fixed + logits_left, frontier(fixed)});
    begin(offers);
    order_.clear();
    order_.reserve(offered);
    seen_.fill({0, 0});
    // Sums must leave room for a time when they are compared crosswise.
    std::uint64_t all = now.value;
    for (const RowOffer& offer : offers)
      all += offer.reach.empty() ? 0 : offer.reach.size() * std::uint64_t{offer.gain(0)};
    shift_ = std::max(0, static_cast<int>(std::bit_width(all)) - 40);

    Point best = now;
    note(now);
    while (now.rows < most && static_cast<double>(cost_.time(now.rows + 1)) * cost_.unit() <= limits.time) {
      const std::size_t i = next(offers);
      if (i == offers.size()) break;
      now.value += offers[i].gain(static_cast<std::size_t>(rows[i]++ - offers[i].fixed));
      ++now.rows;
      order_.push_back(static_cast<std::uint32_t>(i));
      note(now);
      if (pays(now, best)) best = now;
    }
    if (cost_.learns()) best = probe(best);
    paid_ = std::max(best.rows - fixed, paid_ - paid_ / 8);
    for (std::size_t k = order_.size(); k > best.rows - fixed; --k) --rows[order_[k - 1]];
    return best.rows;
  }

  /// How many rows are worth planning for the next step: few where lately few paid, since rows that are planned and
  /// dropped cost time too.
  [[nodiscard]] std::size_t rows_worth_planning() const noexcept {
    return cost_.free() ? StepCost::row_limit : std::min(cost_.max_rows(), 1 + std::max<std::size_t>(8, 2 * paid_));
  }

  /// Takes the time of a step that had `rows` rows in all; nothing where the cost is not learnt, or the time is not
  /// `StepCost::usable`.
  void observe(std::size_t rows, double nanoseconds) noexcept {
    if (!cost_.learns() || rows == 0 || !StepCost::usable(nanoseconds)) return;
    cost_.observe(rows, nanoseconds);
    last_[StepCost::class_of(rows)] = step_;
    allowance_ = std::min(allowance_ + probe_share * nanoseconds, most_saved * nanoseconds);
  }

  /// A new text begins, or all of a batch: what paid for others says nothing of it. What is known of costs stays.
  void restart() noexcept { paid_ = first_paid; }

  [[nodiscard]] const StepCost& cost() const noexcept { return cost_; }

 private:
  /// A number of rows, and the tokens expected of them, Q32.32.
  struct Point {
    std::size_t rows;
    std::uint64_t value;
  };

  static constexpr double probe_share = 0.005;       ///< of the time
  static constexpr double most_saved = 8;            ///< steps: an allowance that grows no further
  static constexpr std::uint64_t stale = 32;         ///< steps
  static constexpr std::size_t reach_of_probes = 2;  ///< classes beside that of the best number
  static constexpr std::size_t first_paid = 32;      ///< rows that pay, as long as nothing is known

  /// The most rows to consider where the cost is learnt: one class beyond those that were measured, so that what is
  /// not known is approached from what is. Before the first measurement: the fixed rows.
  [[nodiscard]] std::size_t frontier(std::size_t fixed) const noexcept {
    if (!cost_.learns()) return StepCost::row_limit;
    if (!cost_.known(fixed)) return fixed;
    std::size_t c = StepCost::class_of(fixed);
    while (c + 1 < StepCost::class_count && cost_.known(StepCost::class_end(c))) ++c;
    return StepCost::class_end(c);
  }

  /// Whether `a` gives more tokens in a unit of time than `b`.
  [[nodiscard]] bool pays(const Point& a, const Point& b) const noexcept {
    return (a.value >> shift_) * cost_.time(b.rows) > (b.value >> shift_) * cost_.time(a.rows);
  }

  /// The best point of every class is its last one.
  void note(const Point& p) noexcept { seen_[StepCost::class_of(p.rows)] = p; }

  /// The best point, or one near it that has not been measured for long, if it does not cost more than is allowed.
  [[nodiscard]] Point probe(const Point& best) noexcept {
    const std::size_t c = StepCost::class_of(best.rows);
    const double rate = static_cast<double>(best.value) / cost_.time(best.rows);
    Point chosen = best;
    std::uint64_t oldest = step_ < stale ? 0 : step_ - stale;
    double loss = 0;
    for (std::size_t near = c - std::min(c, reach_of_probes);
         near <= std::min(c + reach_of_probes, StepCost::class_count - 1); ++near) {
      const Point& p = seen_[near];
      if (near == c || p.rows == 0 || last_[near] > oldest) continue;
      const double lost = (cost_.time(p.rows) - static_cast<double>(p.value) / rate) * cost_.unit();
      if (!(lost <= allowance_)) continue;  // not a number where nothing is expected of any row
      chosen = p;
      oldest = last_[near];
      loss = lost;
    }
    allowance_ -= std::max(loss, 0.0);
    return chosen;
  }

  // The sequence with the largest next gain, the first one on ties: a heap.
  struct Head {
    std::uint32_t gain, sequence, taken;
    bool operator<(const Head& other) const noexcept {
      return gain != other.gain ? gain < other.gain : sequence > other.sequence;
    }
  };

  void begin(std::span<const RowOffer> offers) {
    heads_.clear();
    heads_.reserve(offers.size());
    for (std::size_t i = 0; i < offers.size(); ++i)
      if (!offers[i].reach.empty()) heads_.push_back({offers[i].gain(0), static_cast<std::uint32_t>(i), 1});
    std::make_heap(heads_.begin(), heads_.end());
  }

  [[nodiscard]] std::size_t next(std::span<const RowOffer> offers) {
    if (heads_.empty()) return offers.size();
    std::pop_heap(heads_.begin(), heads_.end());
    Head& head = heads_.back();
    const std::size_t i = head.sequence;
    if (head.taken == offers[i].reach.size()) {
      heads_.pop_back();
    } else {
      head.gain = offers[i].gain(head.taken++);
      std::push_heap(heads_.begin(), heads_.end());
    }
    return i;
  }

  StepCost cost_;
  std::vector<Head> heads_;
  std::vector<std::uint32_t> order_;
  std::array<Point, StepCost::class_count> seen_{};          ///< of this step
  std::array<std::uint64_t, StepCost::class_count> last_{};  ///< step of the last measurement
  std::uint64_t step_ = 0;
  std::size_t paid_ = first_paid;  ///< the most rows that lately paid
  double allowance_ = 0;           ///< nanoseconds that probes may lose
  int shift_ = 0;
};

}  // namespace lookahead
