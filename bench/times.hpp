#pragma once
/// @file times.hpp
/// Times of several rounds over the same prompts.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace lookahead::bench {

/// The seconds that one way to decode took, by prompt and round.
class Times {
 public:
  void add(std::size_t prompt, double seconds) {
    if (prompt >= of_prompts_.size()) of_prompts_.resize(prompt + 1);
    of_prompts_[prompt].push_back(seconds);
  }

  /// Of each prompt the median over the rounds. Precondition: each has a time.
  [[nodiscard]] std::vector<double> medians() const {
    std::vector<double> all;
    for (std::vector<double> times : of_prompts_) {
      std::ranges::sort(times);
      const std::size_t half = times.size() / 2;
      all.push_back(times.size() % 2 == 1 ? times[half] : (times[half - 1] + times[half]) / 2);
    }
    return all;
  }

  /// Their sum.
  [[nodiscard]] double seconds() const {
    const std::vector<double> all = medians();
    return std::accumulate(all.begin(), all.end(), 0.0);
  }

 private:
  std::vector<std::vector<double>> of_prompts_;
};

/// The middle 95% of how many times as fast as `a` `b` is, over choices of prompts with repetition (the bootstrap;
/// Efron, 1979). Precondition: both have the same prompts, at least one.
[[nodiscard]] inline std::pair<double, double> interval(const Times& a, const Times& b) {
  const std::vector<double> of_a = a.medians(), of_b = b.medians();
  std::mt19937 random(1);
  std::vector<double> gains(2000);
  for (double& gain : gains) {
    double sum_a = 0, sum_b = 0;
    for (std::size_t i = 0; i < of_a.size(); ++i) {
      const std::size_t p = random() % of_a.size();
      sum_a += of_a[p];
      sum_b += of_b[p];
    }
    gain = sum_a / sum_b;
  }
  std::ranges::sort(gains);
  return {gains[gains.size() / 40], gains[gains.size() - 1 - gains.size() / 40]};
}

}  // namespace lookahead::bench
