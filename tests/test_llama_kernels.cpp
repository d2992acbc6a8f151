#include <algorithm>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <vector>

#include "engines/kernels.hpp"

namespace {

using namespace lookahead::engines;

std::vector<float> normal_numbers(std::mt19937& random, std::size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

TEST_CASE("weights decode to the numbers that the file format defines") {
  std::mt19937 random(1);
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type :
         {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1}) {
      INFO(kernels->name, " ", weight_type_name(type));
      for (const int columns : {32, 96, 43}) {
        if (columns % 32 != 0 && block_numbers(type) > 1) continue;
        const std::size_t n = static_cast<std::size_t>(columns), stride = row_bytes(type, n);
        std::vector<std::byte> data(3 * stride);
        for (std::size_t r = 0; r < 3; ++r)
          encode_row(type, normal_numbers(random, n).data(), n, data.data() + r * stride);
        const Matrix matrix{data.data(), stride, type, 3, columns};
        for (int r = 0; r < 3; ++r) {
          std::vector<float> out(padded(columns)), expected(n);
          kernels->decode(matrix, r, out.data());
          decode_row(type, data.data() + static_cast<std::size_t>(r) * stride, n, expected.data());
          for (std::size_t i = 0; i < n; ++i) {
            if (type == WeightType::q4_1)
              CHECK(out[i] == doctest::Approx(expected[i]).epsilon(1e-6));  // fused or not
            else
              CHECK(out[i] == expected[i]);
          }
        }
      }
      if (type != WeightType::f16) continue;
      for (std::uint32_t bits = 0; bits < 0x10000; bits += 8) {  // every exponent, zeros, subnormals, infinities
        std::uint16_t pattern[8];
        for (std::uint32_t i = 0; i < 8; ++i) pattern[i] = static_cast<std::uint16_t>(bits + i);
        const auto* const row = reinterpret_cast<const std::byte*>(pattern);
        float out[32], expected[8];
        kernels->decode({row, sizeof pattern, type, 1, 8}, 0, out);
        decode_row(type, row, 8, expected);
        for (int i = 0; i < 8; ++i) REQUIRE((out[i] == expected[i] || std::isnan(expected[i])));
      }
    }
}

TEST_CASE("products do not depend on the other rows and outputs of a call") {
  std::mt19937 random(2);
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type :
         {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1})
      for (const int columns : {32, 1056, 45, 4128}) {
        if (columns % 32 != 0 && block_numbers(type) > 1) continue;
        INFO(kernels->name, " ", weight_type_name(type), " ", columns);
        constexpr int outputs = 21;
        const int most = columns < 4000 ? 200 : 20;
        const std::size_t n = static_cast<std::size_t>(columns), stride = row_bytes(type, n), ldx = padded(columns);
        std::vector<std::byte> data(outputs * stride);
        for (std::size_t o = 0; o < outputs; ++o)
          encode_row(type, normal_numbers(random, n).data(), n, data.data() + o * stride);
        const Matrix matrix{data.data(), stride, type, outputs, columns};
        std::vector<float> x(static_cast<std::size_t>(most) * ldx);
        for (std::size_t r = 0; r < static_cast<std::size_t>(most); ++r)
          std::copy_n(normal_numbers(random, n).begin(), n, x.begin() + static_cast<std::ptrdiff_t>(r * ldx));
        std::vector<float> alone(static_cast<std::size_t>(most * outputs));
        for (std::size_t r = 0; r < static_cast<std::size_t>(most); ++r)
          for (int o = 0; o < outputs; ++o)
            kernels->multiply(matrix, o, o + 1, x.data() + r * ldx, ldx, 1, alone.data() + r * outputs, outputs);
        std::vector<float> weights(n);
        for (std::size_t o = 0; o < outputs; ++o) {
          decode_row(type, data.data() + o * stride, n, weights.data());
          double sum = 0, magnitude = 0;
          for (std::size_t i = 0; i < n; ++i) {
            const double product = static_cast<double>(weights[i]) * static_cast<double>(x[i]);
            sum += product;
            magnitude += std::abs(product);
          }
          REQUIRE(std::abs(static_cast<double>(alone[o]) - sum) <= 1e-5 * magnitude);
        }
        for (const int rows : {1, 2, 3, 4, 5, 6, 8, 13, 16, 17, 64, 95, 96, 97, 98, 99, 100, 193, 200}) {
          if (rows > most) continue;
          const int first = static_cast<int>(random() % outputs),
                    skipped = static_cast<int>(random() % static_cast<unsigned>(most - rows + 1));
          const float untouched = -12345;
          std::vector<float> y(alone.size(), untouched);
          kernels->multiply(matrix, first, outputs, x.data() + static_cast<std::size_t>(skipped) * ldx, ldx, rows,
                            y.data(), outputs);
          for (int r = 0; r < most; ++r)
            for (int o = 0; o < outputs; ++o)
              REQUIRE(
                  y[static_cast<std::size_t>(r * outputs + o)] ==
                  (r < rows && o >= first ? alone[static_cast<std::size_t>((r + skipped) * outputs + o)] : untouched));
        }
      }
}

TEST_CASE("attention sums add one product after the other") {
  std::mt19937 random(3);
  for (const Kernels* kernels : available_kernels())
    for (const int n : {32, 64, 12, 45}) {
      const int m = 9, k = 37;
      const std::size_t width = static_cast<std::size_t>(n);
      const std::vector<float> a = normal_numbers(random, 9 * 40), b = normal_numbers(random, 37 * width);
      const std::vector<float> start = normal_numbers(random, 9 * width);
      std::vector<float> whole = start, pieces = start;
      kernels->accumulate(a.data(), 40, b.data(), width, whole.data(), width, m, k, n);
      for (int i = 0; i < m; ++i)
        for (int p = 0; p < k;) {
          const int step = std::min(k - p, 1 + static_cast<int>(random() % 5));
          kernels->accumulate(a.data() + i * 40 + p, 40, b.data() + static_cast<std::size_t>(p) * width, width,
                              pieces.data() + static_cast<std::size_t>(i) * width, width, 1, step, n);
          p += step;
        }
      CHECK(whole == pieces);
      for (std::size_t i = 0; i < 9; ++i)
        for (std::size_t j = 0; j < width; ++j) {
          double expected = static_cast<double>(start[i * width + j]);
          for (std::size_t p = 0; p < 37; ++p)
            expected += static_cast<double>(a[i * 40 + p]) * static_cast<double>(b[p * width + j]);
          REQUIRE(std::abs(static_cast<double>(whole[i * width + j]) - expected) < 1e-4);
        }
    }
}

TEST_CASE("exponentials") {
  std::mt19937 random(4);
  for (const Kernels* kernels : available_kernels())
    for (const int n : {1, 5, 16, 33, 100}) {
      std::vector<float> s(padded(n), 1e30F);
      float most = -1e30F;
      double sum = 0;
      for (int i = 0; i < n; ++i) {
        s[static_cast<std::size_t>(i)] = static_cast<float>(random() % 4000) * 0.01F - 20.0F;
        most = std::max(most, s[static_cast<std::size_t>(i)]);
      }
      const std::vector<float> given = s;
      const float result = kernels->exponentials(s.data(), n);
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        const double expected = std::exp(static_cast<double>(given[i] - most));
        sum += expected;
        CHECK(std::abs(static_cast<double>(s[i]) - expected) <= 3e-7 * expected);
      }
      CHECK(static_cast<double>(result) == doctest::Approx(sum).epsilon(1e-6));
    }
}

TEST_CASE("gate") {
  std::mt19937 random(5);
  for (const Kernels* kernels : available_kernels()) {
    std::vector<float> g = {0, -0.0F, 1, -1, 100, -100, 1e30F, -1e30F, 20, -20, 5};
    const std::vector<float> more = normal_numbers(random, 40);
    g.insert(g.end(), more.begin(), more.end());
    const std::vector<float> given = g, up = normal_numbers(random, g.size());
    kernels->gate(g.data(), up.data(), static_cast<int>(g.size()));
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double x = static_cast<double>(given[i]), expected = x / (1 + std::exp(-x)) * static_cast<double>(up[i]);
      CHECK(std::abs(static_cast<double>(g[i]) - expected) <= 1e-6 * std::abs(expected) + 1e-7);
      std::vector<float> one = {given[i]};
      kernels->gate(one.data(), &up[i], 1);
      CHECK(one[0] == g[i]);  // wherever it lies
    }
  }
}

TEST_CASE("norm") {
  std::mt19937 random(6);
  for (const Kernels* kernels : available_kernels())
    for (const int n : {64, 45}) {
      const std::size_t count = static_cast<std::size_t>(n);
      std::vector<float> x = normal_numbers(random, count), more = normal_numbers(random, count),
                         w = normal_numbers(random, count), y(count);
      x.resize(padded(n));
      std::vector<double> expected(count);
      double squares = 0;
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = static_cast<double>(x[i] + more[i]);
        squares += expected[i] * expected[i];
      }
      kernels->add_and_normalise(x.data(), more.data(), w.data(), 0.5F, n, y.data());
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(static_cast<double>(x[i]) == expected[i]);
        CHECK(static_cast<double>(y[i]) ==
              doctest::Approx(expected[i] / std::sqrt(squares / n + 0.5) * static_cast<double>(w[i])).epsilon(1e-5));
      }
    }
}

TEST_CASE("the largest values, the lowest place first on ties") {
  std::mt19937 random(7);
  for (const Kernels* kernels : available_kernels())
    for (int round = 0; round < 300; ++round) {
      const int n = 1 + static_cast<int>(random() % 200);
      std::vector<float> x(static_cast<std::size_t>(n));
      for (float& v : x) v = static_cast<float>(random() % 20);
      std::vector<std::int32_t> order(x.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return x[static_cast<std::size_t>(a)] > x[static_cast<std::size_t>(b)];
      });
      for (const int count : {1, 2, 8, 300}) {
        std::vector<std::int32_t> out(300);
        const int found = kernels->top(x.data(), n, out.data(), count);
        REQUIRE(found == std::min(n, count));
        REQUIRE(std::equal(out.begin(), out.begin() + found, order.begin()));
      }
    }
  const float same[40] = {};
  std::int32_t first = -1;
  CHECK(available_kernels().front()->top(same, 40, &first, 1) == 1);
  CHECK(first == 0);
}

}  // namespace
