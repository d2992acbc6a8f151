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

// Rows of random weights as files store them, and as kernels take them.
struct Weights {
  Weights(WeightType type, int outputs, int columns, std::mt19937& random)
      : n(static_cast<std::size_t>(columns)), stride(row_bytes(type, n)) {
    const auto rows = static_cast<std::size_t>(outputs), together = static_cast<std::size_t>(interleaved);
    stored.resize(rows * stride);
    for (std::size_t o = 0; o < rows; ++o)
      encode_row(type, normal_numbers(random, n).data(), n, stored.data() + o * stride);
    arranged = stored;
    if (is_packed(type)) {
      arranged.resize((rows + together - 1) / together * together * stride);
      for (int o = 0; o < outputs; o += interleaved)
        interleave(type, stored.data() + static_cast<std::size_t>(o) * stride, std::min(interleaved, outputs - o), n,
                   arranged.data() + static_cast<std::size_t>(o) * stride);
    }
    matrix = {arranged.data(), stride, type, outputs, columns};
  }
  std::vector<float> row(int o) const {
    std::vector<float> out(n);
    decode_row(matrix.type, stored.data() + static_cast<std::size_t>(o) * stride, n, out.data());
    return out;
  }

  std::size_t n, stride;
  std::vector<std::byte> stored, arranged;
  Matrix matrix;
};

// Rounds whole blocks as the quantised form does; returns what one unit of each is worth.
std::vector<float> round_to_quanta(std::vector<float>& x) {
  std::vector<float> scales;
  for (std::size_t b = 0; b < x.size(); b += block_size) {
    float most = 0;
    for (std::size_t i = b; i < b + block_size; ++i) most = std::max(most, std::abs(x[i]));
    scales.push_back(most / 127);
    for (std::size_t i = b; i < b + block_size; ++i) x[i] = most > 0 ? std::nearbyint(x[i] * (127 / most)) : 0;
  }
  return scales;
}

TEST_CASE("halves of all kinds are the numbers that the file format defines") {
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type : {WeightType::f16, WeightType::bf16}) {
      INFO(kernels->name, " ", weight_type_name(type));
      std::vector<std::uint16_t> patterns(0x10000);
      for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
      const auto* const stored = reinterpret_cast<const std::byte*>(patterns.data());
      std::vector<float> expected(patterns.size()), y(patterns.size()), x(row_stride(1));
      decode_row(type, stored, expected.size(), expected.data());
      x[0] = 1;
      kernels->multiply({stored, 2, type, 0x10000, 1}, 0, 0x10000, x.data(), x.size(), 1, y.data(), y.size());
      for (std::size_t i = 0; i < y.size(); ++i)
        if (!(y[i] == expected[i] || (std::isnan(y[i]) && std::isnan(expected[i])))) FAIL(i);
    }
}

TEST_CASE("products of packed weights are exact integers within a block, at the ends of their ranges too") {
  std::mt19937 random(8);
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type : {WeightType::q8_0, WeightType::q4_0, WeightType::q4_1})
      for (int round = 0; round < 500; ++round) {
        INFO(kernels->name, " ", weight_type_name(type), " ", round);
        Weights w(type, 16, 32, random);
        const std::size_t halves = type == WeightType::q4_1 ? 4 : 2;
        const std::uint16_t one = 0x3C00, offset = 0x4500;  // d = 1, m = 5
        for (std::size_t o = 0; o < 16; ++o) {
          std::byte* const block = w.stored.data() + o * w.stride;
          std::memcpy(block, &one, 2);
          if (halves == 4) std::memcpy(block + 2, &offset, 2);
          for (std::size_t i = halves; i < w.stride; ++i) {
            const std::byte ends[] = {std::byte{0x80}, std::byte{0x7F}, std::byte{0xFF}, std::byte{0}};
            block[i] = round % 4 == 3 ? static_cast<std::byte>(random() & 0xFF)
                                      : ends[random() % static_cast<unsigned>(round % 4 + 1)];
          }
        }
        interleave(type, w.stored.data(), 16, 32, w.arranged.data());
        std::vector<float> x(row_stride(32)), y(16);
        std::vector<std::int64_t> q(32);
        for (std::size_t i = 0; i < 32; ++i) {
          q[i] = round % 3 == 0   ? 127
                 : round % 3 == 1 ? (random() % 2 == 0 ? 127 : -127)
                                  : static_cast<std::int64_t>(random() % 255) - 127;
          if (i == 0) q[i] = -127;
          x[i] = static_cast<float>(q[i]);
        }
        kernels->quantise(x.data(), 0, 32, 32);
        kernels->multiply(w.matrix, 0, 16, x.data(), x.size(), 1, y.data(), 16);
        for (int o = 0; o < 16; ++o) {
          const std::vector<float> weights = w.row(o);
          std::int64_t expected = 0;
          for (std::size_t i = 0; i < 32; ++i) expected += static_cast<std::int64_t>(weights[i]) * q[i];
          REQUIRE(y[static_cast<std::size_t>(o)] == static_cast<float>(expected));
        }
      }
}

TEST_CASE("activations at the ends of what floats hold") {
  std::mt19937 random(9);
  const float infinity = std::numeric_limits<float>::infinity(), nothing = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type : {WeightType::q8_0, WeightType::q4_0, WeightType::q4_1}) {
      INFO(kernels->name, " ", weight_type_name(type));
      const Weights w(type, 16, 96, random);
      const auto product = [&](const std::vector<float>& middle) {  // of a row whose second block is given
        std::vector<float> x(row_stride(96)), y(16);
        std::fill_n(x.begin(), 96, 1.0F);
        std::copy(middle.begin(), middle.end(), x.begin() + 32);
        kernels->quantise(x.data(), 0, 96, 96);
        kernels->multiply(w.matrix, 0, 16, x.data(), x.size(), 1, y.data(), 16);
        return y;
      };
      const std::vector<float> without = product(std::vector<float>(32, 0.0F));
      for (const float tiny : {1e-30F, 1e-38F, 1e-45F, -1e-40F})
        CHECK(product(std::vector<float>(32, tiny)) == without);
      for (const float end : {infinity, -infinity, nothing, -nothing})
        for (const std::size_t place : {0U, 13U, 31U}) {
          std::vector<float> middle(32, 2.0F);
          middle[place] = end;
          for (const float y : product(middle)) CHECK(!std::isfinite(y));
        }
      const float most = std::numeric_limits<float>::max() / 65536;  // products of a block must not overflow
      std::vector<float> middle(32, 0.0F);
      middle[3] = most;
      const std::vector<float> large = product(middle);
      for (int o = 0; o < 16; ++o)
        CHECK(std::abs(large[static_cast<std::size_t>(o)] - w.row(o)[35] * most) <= 1e-5F * most);
    }
}

TEST_CASE("products do not depend on the other rows and outputs of a call") {
  std::mt19937 random(2);
  for (const Kernels* kernels : available_kernels())
    for (const WeightType type :
         {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1})
      for (const int columns : {32, 1056, 45, 4128}) {
        const bool packed = is_packed(type);
        if (columns % 32 != 0 && packed) continue;
        INFO(kernels->name, " ", weight_type_name(type), " ", columns);
        constexpr int outputs = 37;
        const int most = columns < 4000 ? 200 : 20;
        const Weights w(type, outputs, columns, random);
        const std::size_t ldx = row_stride(columns);
        std::vector<float> x(static_cast<std::size_t>(most) * ldx);
        for (std::size_t r = 0; r < static_cast<std::size_t>(most); ++r) {
          std::copy_n(normal_numbers(random, w.n).begin(), w.n, x.begin() + static_cast<std::ptrdiff_t>(r * ldx));
          if (packed)
            for (int i = 0; i < columns; i += 96)
              kernels->quantise(x.data() + r * ldx, i, std::min(i + 96, columns), columns);
        }
        std::vector<float> alone(static_cast<std::size_t>(most * outputs));
        for (std::size_t r = 0; r < static_cast<std::size_t>(most); ++r)
          for (int o = 0; o < outputs; ++o)
            kernels->multiply(w.matrix, o, o + 1, x.data() + r * ldx, ldx, 1, alone.data() + r * outputs, outputs);
        std::vector<float> rounded(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(w.n)), scales;
        if (packed) scales = round_to_quanta(rounded);
        for (int o = 0; o < outputs; ++o) {
          const std::vector<float> weights = w.row(o);
          double sum = 0, magnitude = 0;
          for (std::size_t i = 0; i < w.n; ++i) {
            const double product = static_cast<double>(weights[i]) * static_cast<double>(rounded[i]) *
                                   (packed ? static_cast<double>(scales[i / block_size]) : 1);
            sum += product;
            magnitude += std::abs(product);
          }
          REQUIRE(std::abs(static_cast<double>(alone[static_cast<std::size_t>(o)]) - sum) <= 1e-6 * magnitude);
        }
        for (const int rows : {1, 2, 3, 4, 5, 6, 8, 13, 16, 17, 64, 95, 96, 97, 98, 99, 100, 193, 200}) {
          if (rows > most) continue;
          const int first = static_cast<int>(random() % outputs),
                    skipped = static_cast<int>(random() % static_cast<unsigned>(most - rows + 1));
          const int last = first + 1 + static_cast<int>(random() % static_cast<unsigned>(outputs - first));
          const float untouched = -12345;
          std::vector<float> y(alone.size(), untouched);
          kernels->multiply(w.matrix, first, last, x.data() + static_cast<std::size_t>(skipped) * ldx, ldx, rows,
                            y.data(), outputs);
          for (int r = 0; r < most; ++r)
            for (int o = 0; o < outputs; ++o)
              REQUIRE(y[static_cast<std::size_t>(r * outputs + o)] ==
                      (r < rows && o >= first && o < last ? alone[static_cast<std::size_t>((r + skipped) * outputs + o)]
                                                          : untouched));
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
