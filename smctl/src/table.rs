//! Plain text tables: columns as wide as their widest cell, two spaces between them.

use std::io::{self, Write};

/// Which side of its column a cell sticks to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table that is written at once, when all rows are known.
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Table {
        Table {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; missing cells are empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Writes heading and rows, each line after `indent`, without spaces at line ends.
    pub(crate) fn write(&self, out: &mut dyn Write, indent: &str) -> io::Result<()> {
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, (title, _))| {
                let cells = self.rows.iter().filter_map(|row| row.get(i));
                cells
                    .map(|cell| cell.chars().count())
                    .fold(title.chars().count(), usize::max)
            })
            .collect();
        let titles: Vec<String> = self
            .columns
            .iter()
            .map(|(title, _)| title.to_string())
            .collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            let mut line = String::from(indent);
            for (cell, (width, (_, align))) in row.iter().zip(widths.iter().zip(&self.columns)) {
                let width = *width;
                match align {
                    Align::Left => line.push_str(&format!("{cell:<width$}  ")),
                    Align::Right => line.push_str(&format!("{cell:>width$}  ")),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[
            ("A", Align::Left),
            ("NUM", Align::Right),
            ("B", Align::Left),
        ]);
        table.row(["é".into(), "1".into(), "last".into()]);
        table.row(["longer".into(), "1234".into()]);
        let mut out = Vec::new();
        table.write(&mut out, "  ").unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "  A        NUM  B\n  é          1  last\n  longer  1234\n"
        );
    }
}
